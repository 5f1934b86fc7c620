"""Serves the live page at `/ui`, and sends browsers there that ask for `/`.

The outermost middleware of upstream's application: the page holds nothing of the server and loads
without a key. It asks the user for one, and everything that it shows then is fetched with it. The
files are those of `managers/page/`; they are small, and kept in memory, compressed.
"""

import gzip
import hashlib
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

PAGE_DIRECTORY = Path(__file__).resolve().parent.parent / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Everything from this server, no inline script or style, in no frame, and no string is ever markup.
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page, ready to be sent."""

    media_type: str
    plain: bytes
    compressed: bytes
    etag: str


def read_page(directory: Path = PAGE_DIRECTORY) -> dict[str, PageFile]:
    """The files by the name that a browser asks for, the page itself as ""."""
    files = {}
    for path in sorted(directory.iterdir()):
        if path.suffix in MEDIA_TYPES:
            plain = path.read_bytes()
            name = "" if path.name == "index.html" else path.name
            files[name] = PageFile(
                MEDIA_TYPES[path.suffix],
                plain,
                gzip.compress(plain, mtime=0),
                f'"{hashlib.sha256(plain).hexdigest()[:16]}"',
            )
    return files


def serve_page(app: Any) -> None:
    """Puts the page in front of upstream's FastAPI application, whose other middleware must have
    been added, and which must not have been started."""
    app.add_middleware(LivePage, files=read_page())


class LivePage:
    """ASGI middleware; requests for anything but the page go on to the application."""

    def __init__(self, app: ASGIApp, files: dict[str, PageFile]) -> None:
        self._app = app
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = self._reply(scope) if scope["type"] == "http" else None
        await (reply or self._app)(scope, receive, send)

    def _reply(self, scope: Scope) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return None
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root)
        headers = Headers(scope=scope)
        if path == "/":
            if "text/html" not in headers.get("accept", ""):
                return None
            return RedirectResponse(f"{root}/ui/", headers={"Vary": "Accept"})
        if path == "/ui":
            return RedirectResponse(f"{root}/ui/")
        if not path.startswith("/ui/"):
            return None
        file = self._files.get(path.removeprefix("/ui/"))
        if file is None:
            return Response("no such file", HTTPStatus.NOT_FOUND, media_type="text/plain")
        return _file_reply(file, headers)


def _file_reply(file: PageFile, asked: Headers) -> Response:
    headers = SECURITY_HEADERS | {
        "Cache-Control": "no-cache",  # may be kept, and is asked for again
        "ETag": file.etag,
        "Vary": "Accept-Encoding",
    }
    if file.etag in asked.get("if-none-match", ""):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    body = file.plain
    if "gzip" in asked.get("accept-encoding", ""):
        body = file.compressed
        headers["Content-Encoding"] = "gzip"
    return Response(body, headers=headers, media_type=file.media_type)
