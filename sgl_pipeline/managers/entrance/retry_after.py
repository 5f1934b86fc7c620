"""Adds to every 503 the time after which to ask again: the second-outermost middleware.

The server is full, is stopping, or cannot serve without a stage that it has lost: in each case a
client can ask another server at once, and this one, or its replacement, after a while.
"""

from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# About the time of a start.
RETRY_AFTER_S = 10


class RetryAfter:
    """ASGI middleware: adds `Retry-After` (RFC 9110, 10.2.3) if a route has not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def dated_send(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start and message["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
                MutableHeaders(scope=message).setdefault("Retry-After", str(RETRY_AFTER_S))
            await send(message)

        await self._app(scope, receive, dated_send if scope["type"] == "http" else send)
