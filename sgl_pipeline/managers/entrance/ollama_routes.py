"""Completes upstream's routes of Ollama's API: errors in Ollama's form, and whole streams."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OLLAMA_ROUTES = frozenset({"/api/chat", "/api/generate"})


def is_ollama(path: str) -> bool:
    """True if a route is one of Ollama's."""
    return path.startswith("/api/")


def ollama_refusal(message: str) -> JSONResponse:
    """A 400 in Ollama's form."""
    return JSONResponse({"error": message}, HTTPStatus.BAD_REQUEST)


class OllamaErrors:
    """ASGI middleware: answers a refused request of these routes with a 400 in Ollama's form.

    Upstream's handlers let its ValueError through, which would be a 500 without a word, or a 200
    that breaks off. So a reply's head waits until its body begins.
    """

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


async def ends_apart(replies: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """`replies`, each with all text so far. The last one, if it has new text, is sent twice: as if
    the answer went on, and as its end. Those routes write an empty text beside `done`, so the text
    that came with the end would never be sent: at least the last token of every answer that
    reached `num_predict`."""
    sent = ""
    async with aclosing(replies):
        async for reply in replies:
            text, meta = reply.get("text", ""), reply.get("meta_info", {})
            if meta.get("finish_reason") is not None and text != sent:
                yield reply | {"meta_info": meta | {"finish_reason": None}}
            sent = text
            yield reply
