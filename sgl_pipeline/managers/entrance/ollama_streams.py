"""Keeps the last text of Ollama's streams, which upstream's routes would lose.

Those routes write an empty text beside `done`, so text that came together with the end, at least
the last token of every answer that reached `num_predict`, would never be sent.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

OLLAMA_ROUTES = frozenset({"/api/chat", "/api/generate"})


async def ends_apart(replies: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """`replies`, each with all text so far; repeats a last one that brings text, first as if the
    answer went on, then as its end."""
    told = ""
    async with aclosing(replies):
        async for reply in replies:
            text, meta = reply.get("text", ""), reply.get("meta_info", {})
            if meta.get("finish_reason") is not None and text != told:
                yield reply | {"meta_info": meta | {"finish_reason": None}}
            told = text
            yield reply
