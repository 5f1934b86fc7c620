"""Frames the pieces of a streamed body, in h11's place.

uvicorn hands each piece to h11, whose state machine makes some twenty calls for it. A piece within
a body changes no state there, and its frame is its length and two line ends (RFC 9112, 7.1), so
this writes it to uvicorn's transport itself. Heads and ends of responses stay h11's.
"""

from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

_WITHOUT_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)


class StreamPieces:
    """ASGI middleware. Those around it must hand on uvicorn's own `receive`, of which it takes the
    connection; with another server than uvicorn on h11 it does nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = getattr(receive, "__self__", None)
        if isinstance(connection, RequestResponseCycle):
            send = _framing(connection, scope, send)
        await self._app(scope, receive, send)


def _framing(connection: RequestResponseCycle, scope: Scope, send: Send) -> Send:
    transport, flow = connection.transport, connection.flow
    is_chunked = False

    async def send_framed(message: Message) -> None:
        nonlocal is_chunked
        if message["type"] == "http.response.start":
            is_chunked = _is_chunked(scope, message)
        elif not message.get("more_body", False):
            is_chunked = False  # uvicorn says what is wrong with a piece behind the last one
        elif is_chunked and not flow.write_paused and not connection.disconnected:
            if body := message.get("body", b""):
                transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            return
        await send(message)

    return send_framed


def _is_chunked(scope: Scope, start: Message) -> bool:
    """True if h11 frames the body that follows `start` in chunks (its `_body_framing`)."""
    if scope["http_version"] != "1.1" or scope["method"] in ("HEAD", "CONNECT"):
        return False
    if start["status"] in _WITHOUT_BODY:
        return False
    return all(name.lower() != b"content-length" for name, _ in start.get("headers", ()))
