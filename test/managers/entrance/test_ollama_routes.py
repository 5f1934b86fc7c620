import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from sgl_pipeline.managers.entrance.ollama_routes import OllamaErrors, ends_apart
from sgl_pipeline.managers.entrance.route_guard import answer_value_error


def lines(error_after: int) -> Iterator[bytes]:
    for number in range(3):
        if number == error_after:
            raise ValueError("temperature must not be negative")
        yield b"line\n"


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()

    @app.get("/api/chat")
    @app.get("/elsewhere")
    def refuse() -> None:
        raise ValueError("temperature must not be negative")

    @app.get("/api/stream/{error_after}")
    def stream(error_after: int) -> StreamingResponse:
        return StreamingResponse(lines(error_after))

    app.add_middleware(OllamaErrors)
    app.add_exception_handler(ValueError, answer_value_error)
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize("path", ["/api/chat", "/api/stream/0"])
def test_a_refusal_is_a_400_in_ollamas_form(client: TestClient, path: str) -> None:
    reply = client.get(path)
    assert reply.status_code == 400
    assert reply.json() == {"error": "temperature must not be negative"}


def test_a_reply_passes_whole(client: TestClient) -> None:
    reply = client.get("/api/stream/3")
    assert (reply.status_code, reply.content) == (200, b"line\n" * 3)


def test_an_error_behind_the_first_line_is_no_refusal(client: TestClient) -> None:
    with client.stream("GET", "/api/stream/1") as reply:
        assert reply.status_code == 200


def test_other_routes_keep_the_form_of_their_errors(client: TestClient) -> None:
    reply = client.get("/elsewhere")
    assert reply.json() == {"error": {"message": "temperature must not be negative"}}


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
