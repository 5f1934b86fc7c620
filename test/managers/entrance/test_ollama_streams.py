import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from sgl_pipeline.managers.entrance.ollama_streams import ends_apart

STOP = {"type": "stop"}


def reply(text: str, finish: dict[str, str] | None = None) -> dict[str, Any]:
    return {"text": text, "meta_info": {"id": "r", "finish_reason": finish}}


def passed_on(*replies: dict[str, Any]) -> list[dict[str, Any]]:
    async def upstream() -> AsyncGenerator[Any, None]:
        for one in replies:
            yield one

    async def collect() -> list[dict[str, Any]]:
        return [one async for one in ends_apart(upstream())]

    return asyncio.run(collect())


def test_the_last_words_come_before_the_end() -> None:
    replies = passed_on(reply("4"), reply("42", STOP))
    assert replies == [reply("4"), reply("42"), reply("42", STOP)]


def test_an_answer_of_one_piece_is_sent_too() -> None:
    assert passed_on(reply("42", STOP)) == [reply("42"), reply("42", STOP)]


def test_an_end_without_news_is_sent_once() -> None:
    assert passed_on(reply("42"), reply("42", STOP)) == [reply("42"), reply("42", STOP)]
