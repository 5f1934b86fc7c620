"""Ollama's routes answer a bad request with a 400 in Ollama's form.

Upstream's handlers of these routes let the ValueError of a refused request through, which would be
a 500 without a word, or a 200 that breaks off.
"""

from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def is_ollama(path: str) -> bool:
    """Whether a route is one of Ollama's."""
    return path.startswith("/api/")


def ollama_refusal(message: str) -> JSONResponse:
    """A 400 in Ollama's form."""
    return JSONResponse({"error": message}, HTTPStatus.BAD_REQUEST)


class OllamaErrors:
    """ASGI middleware: holds a reply's head back until its body begins, in case there is none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_ollama(scope["path"]):
            await self._app(scope, receive, send)
            return
        head: Message | None = None
        has_begun = False

        async def send_with_body(message: Message) -> None:
            nonlocal head, has_begun
            if message["type"] == "http.response.start":
                head = message
                return
            if head is not None:
                has_begun = True
                await send(head)
                head = None
            await send(message)

        try:
            await self._app(scope, receive, send_with_body)
        except (ValueError, RuntimeError) as error:
            # After a reply's head, Starlette wraps what its error handlers can no longer answer.
            refused = error.__cause__ if isinstance(error, RuntimeError) else error
            if has_begun or not isinstance(refused, ValueError):
                raise
            await ollama_refusal(str(refused))(scope, receive, send)
