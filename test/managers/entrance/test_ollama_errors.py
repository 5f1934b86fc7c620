from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from sgl_pipeline.managers.entrance.ollama_errors import OllamaErrors
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
