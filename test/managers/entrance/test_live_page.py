"""The page's files: small, from this server alone, and in front of everything that needs a key."""

import gzip
import hashlib
import re
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware

from sgl_pipeline.managers.entrance.live_page import PAGE_DIRECTORY, read_page, serve_page

MAX_PAGE_BYTES = 60 * 1024
# Of the npm registry's uplot-1.6.32.tgz, dist/uPlot.iife.min.js and dist/uPlot.min.css.
UPLOT = {
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def client(**keys: str | None) -> TestClient:
    app = FastAPI()

    @app.get("/")
    async def root() -> str:
        return "SGLang is running"

    @app.get("/v1/models")
    async def models() -> str:
        return "secret"

    if keys:
        add_api_key_middleware(app, **({"api_key": None, "admin_api_key": None} | keys))
    serve_page(app)
    return TestClient(app, follow_redirects=False)


def test_the_whole_page_is_small() -> None:
    sizes = {name: len(file.compressed) for name, file in read_page().items()}
    assert {"", "app.js", "style.css", "uplot.js"} <= set(sizes)
    assert sum(sizes.values()) <= MAX_PAGE_BYTES, sizes


def test_every_file_of_the_folder_is_served_as_it_is() -> None:
    page, web = read_page(), client()
    assert len(page) == len(list(PAGE_DIRECTORY.iterdir()))
    for name, file in page.items():
        reply = web.get(f"/ui/{name}")
        assert reply.status_code == 200 and reply.content == file.plain
        assert reply.headers["content-type"] == file.media_type
        assert reply.headers["content-encoding"] == "gzip"
        plain = web.get(f"/ui/{name}", headers={"Accept-Encoding": "identity"})
        assert plain.content == file.plain and "content-encoding" not in plain.headers
        again = web.get(f"/ui/{name}", headers={"If-None-Match": reply.headers["etag"]})
        assert again.status_code == 304 and again.content == b""
        assert gzip.decompress(file.compressed) == file.plain


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    for path in PAGE_DIRECTORY.iterdir():
        if path.name.startswith("uplot"):
            continue
        text = path.read_text()
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text))
        assert addresses <= {"//www.w3.org/2000/svg", "http://www.w3.org/2000/svg"}, path.name
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    html = (PAGE_DIRECTORY / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html)
    for target in re.findall(r"(?:src|href)=\"([^#\"]+)\"", html):
        assert (PAGE_DIRECTORY / target).exists(), target


def test_uplot_is_the_published_file_with_its_license() -> None:
    for name, digest in UPLOT.items():
        assert hashlib.sha256((PAGE_DIRECTORY / name).read_bytes()).hexdigest() == digest
    license = (PAGE_DIRECTORY / "uplot-license.txt").read_text()
    assert "MIT License" in license and "Leon Sorokin" in license


def test_the_policy_is_strict() -> None:
    headers = client().get("/ui/").headers
    policy = dict(
        part.split(" ", 1) for part in headers["content-security-policy"].split("; ") if part
    )
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("accept", "status"),
    [
        ("text/html,application/xhtml+xml,*/*;q=0.8", 307),
        ("*/*", 200),
        ("application/json", 200),
        (None, 200),
    ],
)
def test_a_browser_that_asks_for_the_root_is_sent_to_the_page(
    accept: str | None, status: int
) -> None:
    web = client()
    web.headers.pop("accept")
    reply = web.get("/", headers={} if accept is None else {"Accept": accept})
    assert reply.status_code == status
    if status == 307:
        assert reply.headers["location"] == "/ui/"
    else:
        assert reply.json() == "SGLang is running"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/ui", "/ui/", "/ui/app.js"])
def test_only_what_reads_is_the_pages(method: str, path: str) -> None:
    assert client().request(method, path).status_code in (404, 405)


@pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")  # upstream's refusal is one
@pytest.mark.parametrize("keys", [{"api_key": "k"}, {"api_key": "k", "admin_api_key": "a"}])
def test_the_page_needs_no_key_and_opens_nothing_else(keys: dict[str, Any]) -> None:
    web = client(**keys)
    assert web.get("/ui").headers["location"] == "/ui/"
    assert web.get("/ui/").status_code == web.get("/ui/app.js").status_code == 200
    paths = ["/v1/models", "/ui/../v1/models", "/ui/%2e%2e/v1/models", "/uix", "/ui/x/../../v1"]
    for path in [*paths, "//ui/", "/UI/"]:
        assert web.get(path).status_code in (401, 404), path
        assert "secret" not in web.get(path).text
    assert web.get("/", headers={"Accept": "*/*"}).status_code == 401


@pytest.mark.parametrize(
    "path", ["/ui/none.js", "/ui/../pyproject.toml", "/ui//etc/passwd", "/ui/%2e%2e/page/app.js"]
)
def test_no_other_file_is_served(path: str) -> None:
    assert client().get(path).status_code == 404
