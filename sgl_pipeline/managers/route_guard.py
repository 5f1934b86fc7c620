"""What is turned away at the door of the HTTP server, before upstream's handlers see it.

Installed by `launch_server.py` as a middleware: for routes whose replies have no room for a
refusal, for bodies that are too large, for fields that would be ignored (`openai_fields.py`), and
for new work while the server is stopping.
"""

import logging
from collections.abc import Callable
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_pipeline.managers import openai_fields
from sgl_pipeline.managers.graceful_stop import SHUTTING_DOWN

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20

_MEMORY = "releasing memory at run time"
_EXPERTS = "recording expert distributions"
_EMBEDDINGS = "embeddings, classification and reranking"
_SESSIONS = "sessions"
_SPEECH = "speech recognition"
REFUSED_ROUTES = {
    "/release_memory_occupation": _MEMORY,
    "/resume_memory_occupation": _MEMORY,
    "/slow_down": "slowing down on purpose",
    "/start_expert_distribution_record": _EXPERTS,
    "/stop_expert_distribution_record": _EXPERTS,
    "/dump_expert_distribution_record": _EXPERTS,
    "/open_session": _SESSIONS,
    "/close_session": _SESSIONS,
    "/encode": _EMBEDDINGS,
    "/classify": _EMBEDDINGS,
    "/v1/embeddings": _EMBEDDINGS,
    "/v1/classify": _EMBEDDINGS,
    "/v1/rerank": _EMBEDDINGS,
    "/v1/audio/transcriptions": _SPEECH,
    "/set_internal_state": "changing scheduler settings at run time",
}
# What helps a server to stop.
_OPEN_WHILE_STOPPING = frozenset({"/abort_request", "/continue_generation", "/stop_profile"})
# Upstream's handlers of these let out as an exception, and so as a 500, what is wrong with the
# request or what a reply refuses.
_UNGUARDED_ROUTES = frozenset(
    {
        "/parse_function_call",
        "/separate_reasoning",
        "/vertex_generate",
        "/start_profile",
        "/stop_profile",
    }
)


class RouteGuard:
    """ASGI middleware.

    Args:
        features: what this server was started with.
        is_stopping: whether a SIGTERM has come.
    """

    def __init__(
        self,
        app: ASGIApp,
        features: openai_fields.ServedFeatures,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._app = app
        self._features = features
        self._is_stopping = is_stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if (refusal := self._refusal(scope["method"], path)) is not None:
            await refusal(scope, receive, send)
        elif path in _UNGUARDED_ROUTES:
            await self._catch_bad_input(scope, self._checked(path, receive), send)
        else:
            await self._app(scope, self._checked(path, receive), send)

    def _refusal(self, method: str, path: str) -> JSONResponse | None:
        if (feature := REFUSED_ROUTES.get(path)) is not None:
            return _refusal(f"{feature}: not supported by this server yet")
        is_work = method not in ("GET", "HEAD") and path not in _OPEN_WHILE_STOPPING
        if is_work and self._is_stopping():
            return _refusal(SHUTTING_DOWN, HTTPStatus.SERVICE_UNAVAILABLE)
        return None

    def _checked(self, path: str, receive: Receive) -> Receive:
        """Gives a request's body. Raises what upstream's handlers turn into an error reply of the
        route's own form."""
        body = bytearray()

        async def checked_receive() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"the request is larger than {MAX_BODY_BYTES} bytes",
                )
            if message["type"] == "http.request" and not message.get("more_body", False):
                if (reason := openai_fields.refusal(path, body, self._features)) is not None:
                    raise HTTPException(HTTPStatus.BAD_REQUEST, reason)
                body.clear()
            return message

        return checked_receive

    async def _catch_bad_input(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_replied = False

        async def noted_send(message: Message) -> None:
            nonlocal has_replied
            has_replied = True
            await send(message)

        try:
            await self._app(scope, receive, noted_send)
        except (ValueError, TypeError, RuntimeError) as error:
            if has_replied:
                raise
            logger.warning("%s: %s", scope["path"], error)
            await _refusal(str(error))(scope, receive, send)


def _refusal(message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status)
