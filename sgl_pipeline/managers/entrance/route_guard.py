"""Refuses requests at the door of the HTTP server, before upstream's handlers see them.

It is added to upstream's application by FastAPI's own means: a middleware, for routes whose replies
have no room for a refusal, bodies that are too large, fields that would be ignored
(`openai_fields.py`) and new work while the server is stopping; error handlers; and one replaced
dependency. Nothing of upstream is patched, and nothing that works is changed.
"""

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from sglang.srt.entrypoints.http_server import validate_json_request
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_pipeline.managers.entrance.error_reply import error_reply
from sgl_pipeline.managers.entrance.graceful_stop import SHUTTING_DOWN
from sgl_pipeline.managers.entrance.invalid_body import answer_invalid
from sgl_pipeline.managers.entrance.ollama_routes import is_ollama, ollama_refusal
from sgl_pipeline.managers.entrance.retry_after import RetryAfter
from sgl_pipeline.managers.upstream import openai_fields
from sgl_pipeline.managers.upstream.refused_features import REFUSED_ROUTES, refusal_of
from sgl_pipeline.managers.upstream.request_checks import (
    MALFORMED,
    check_decodable,
    max_prompt_characters,
)

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
# Template, tools and field names, beside the text of a conversation.
CONVERSATION_OVERHEAD_BYTES = 64 * 2**10
# Routes that take many prompts, or ids, at once. Upstream tokenizes the bodies of all other routes
# while every request waits, so these are limited by the context.
BATCH_ROUTES = frozenset({"/generate", "/v1/completions", "/vertex_generate"})

# What helps a server to stop.
_OPEN_WHILE_STOPPING = frozenset({"/abort_request", "/continue_generation", "/stop_profile"})
# Upstream's handlers of these raise a RuntimeError where the reply refuses.
_PROFILE_ROUTES = frozenset({"/start_profile", "/stop_profile"})


def guard_routes(
    app: Any,
    context_length: int,
    features: openai_fields.ServedFeatures,
    is_stopping: Callable[[], bool],
) -> None:
    """Adds all checks of this module to upstream's FastAPI application, before it is started.

    Args:
        context_length: of the model, in tokens.
        features: what this server was started with.
        is_stopping: whether a SIGTERM has come.
    """
    app.add_middleware(
        RouteGuard, context_length=context_length, features=features, is_stopping=is_stopping
    )
    app.add_middleware(RetryAfter)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(ValueError, answer_value_error)
    for kind in MALFORMED:
        app.add_exception_handler(kind, answer_malformed)
    app.add_exception_handler(Exception, answer_crash)
    app.dependency_overrides[validate_json_request] = check_json_request


async def check_json_request(raw_request: Request) -> None:
    """In the place of upstream's `validate_json_request`, a dependency of most routes: that, and
    the one body that its route answers with a 500. Raises RefusedRequestError."""
    await validate_json_request(raw_request)
    if raw_request.url.path.endswith("/detokenize"):
        body = await raw_request.json()
        check_decodable(body.get("tokens") if isinstance(body, dict) else None)


async def answer_value_error(request: Request, error: Exception) -> JSONResponse:
    """For upstream's routes that let a ValueError about their input escape."""
    if is_ollama(request.url.path):
        return ollama_refusal(str(error))
    return error_reply(str(error))


async def answer_malformed(request: Request, error: Exception) -> JSONResponse:
    """For upstream's routes that fail on a body of an unexpected form."""
    logger.error("a body that cannot be read was refused", exc_info=error)
    return error_reply(f"the request cannot be read: {error}")


async def answer_crash(request: Request, error: Exception) -> JSONResponse:
    """For an unexpected exception, and for a key on which upstream's comparison fails."""
    if "non-ASCII" in str(error):
        return JSONResponse({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
    return error_reply("internal error; see the server's log", HTTPStatus.INTERNAL_SERVER_ERROR)


class RouteGuard:
    """ASGI middleware; the arguments are those of `guard_routes`."""

    def __init__(
        self,
        app: ASGIApp,
        context_length: int,
        features: openai_fields.ServedFeatures,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._app = app
        self._max_conversation_bytes = (
            max_prompt_characters(context_length) + CONVERSATION_OVERHEAD_BYTES
        )
        self._features = features
        self._is_stopping = is_stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # For speech, which is not built. Upstream asks no API key of it.
            await send({"type": "websocket.close", "code": 1008, "reason": "not supported"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if (refusal := self._refusal(scope["method"], path)) is not None:
            await refusal(scope, receive, send)
        elif path in _PROFILE_ROUTES:
            await self._catch_refusal(scope, self._checked(path, receive), send)
        else:
            await self._app(scope, self._checked(path, receive), send)

    def _refusal(self, method: str, path: str) -> JSONResponse | None:
        if (feature := REFUSED_ROUTES.get(path)) is not None:
            return error_reply(refusal_of(feature))
        is_work = method not in ("GET", "HEAD") and path not in _OPEN_WHILE_STOPPING
        if is_work and self._is_stopping():
            return error_reply(SHUTTING_DOWN, HTTPStatus.SERVICE_UNAVAILABLE)
        return None

    def _checked(self, path: str, receive: Receive) -> Receive:
        """Gives a request's body. Raises what upstream's handlers turn into an error reply of the
        route's own form: FastAPI's HTTPException; Starlette's, its base, they do not see."""
        body = bytearray()
        max_bytes = MAX_BODY_BYTES if path in BATCH_ROUTES else self._max_conversation_bytes

        async def checked_receive() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            if len(body) > max_bytes:
                raise HTTPException(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"the request is larger than {max_bytes} bytes",
                )
            if message["type"] == "http.request" and not message.get("more_body", False):
                if (reason := openai_fields.refusal(path, body, self._features)) is not None:
                    raise HTTPException(HTTPStatus.BAD_REQUEST, reason)
                body.clear()
            return message

        return checked_receive

    async def _catch_refusal(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_replied = False

        async def noted_send(message: Message) -> None:
            nonlocal has_replied
            has_replied = True
            await send(message)

        try:
            await self._app(scope, receive, noted_send)
        except RuntimeError as error:
            if has_replied:
                raise
            logger.warning("%s: %s", scope["path"], error)
            await error_reply(str(error))(scope, receive, send)
