"""What upstream refuses of a request is answered with fields and faults, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
from fastapi import Depends, FastAPI, Query
from fastapi.testclient import TestClient
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.http_server import validate_json_request
from sglang.srt.entrypoints.ollama.protocol import OllamaGenerateRequest
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
)

from sgl_pipeline.managers.entrance.route_guard import guard_routes
from sgl_pipeline.managers.upstream.openai_fields import ServedFeatures

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"


@pytest.fixture(scope="module")
def client() -> TestClient:
    """Upstream's models behind our guard."""
    app = FastAPI()

    async def chat(request: ChatCompletionRequest) -> None: ...
    async def complete(request: CompletionRequest) -> None: ...
    async def respond(request: ResponsesRequest) -> None: ...
    async def message(request: AnthropicMessagesRequest) -> None: ...
    async def generate(request: OllamaGenerateRequest) -> None: ...
    async def flush_cache(timeout: float = Query(0.0, ge=0.0)) -> None: ...

    async def tokenize(request: TokenizeRequest, limit: int = 0) -> None: ...

    app.post(CHAT)(chat)
    app.post(TOKENIZE)(tokenize)
    app.post(COMPLETIONS)(complete)
    app.post("/v1/responses")(respond)
    app.post("/v1/messages")(message)
    app.post("/api/generate")(generate)
    app.post("/flush_cache")(flush_cache)
    app.post("/score", dependencies=[Depends(validate_json_request)])(complete)
    features = ServedFeatures(parses_tool_calls=False, has_completion_template=False)
    guard_routes(app, 1000, features, is_stopping=lambda: False)
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            CHAT,
            HELLO | {"max_tokens": "ten"},
            "max_tokens: Input should be a valid integer, unable to parse string as an integer "
            "(got 'ten')",
        ),
        (CHAT, {}, "messages: Field required"),
        (CHAT, {"messages": "hi"}, "messages: Input should be a valid list (got 'hi')"),
        (
            CHAT,
            HELLO | {"stop": 7},
            "stop: Input should be a valid list, or Input should be a valid string (got 7)",
        ),
        # Of the models of a message only that of users is meant.
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        (
            CHAT,
            {"messages": [{"role": "king", "content": "x"}]},
            "messages.0.role: 'role' must be one of 'system', 'assistant', 'tool', 'function', "
            "'developer', 'latest_reminder', 'root' (case-insensitive)., or Input should be "
            "'user' (got 'king')",
        ),
        (
            CHAT,
            HELLO | {"response_format": {"type": "xml"}},
            "response_format.type: Input should be 'text', 'json_object' or 'json_schema', or "
            "Input should be 'structural_tag' (got 'xml')",
        ),
        (
            COMPLETIONS,
            {"prompt": "x", "n": 1.5, "seed": "y" * 100},
            "n: Input should be a valid integer, got a number with a fractional part (got 1.5); "
            "seed: Input should be a valid integer, unable to parse string as an integer (got "
            f"'{'y' * 59}...)",
        ),
        (
            TOKENIZE,
            [],
            "the body: Input should be a valid dictionary or object to extract fields from "
            "(got [])",
        ),
        (
            f"{TOKENIZE}?limit=x",
            {"prompt": "x"},
            "limit: Input should be a valid integer, unable to parse string as an integer "
            "(got 'x')",
        ),
    ],
)
def test_a_field_is_named_with_its_fault_and_its_value(
    client: TestClient, path: str, body: Any, message: str
) -> None:
    reply = client.post(path, json=body)
    assert reply.status_code == 400
    assert reply.json() == {
        "object": "error",
        "message": message,
        "type": "Bad Request",
        "param": None,
        "code": 400,
    }


def test_of_many_faults_the_first_fields_are_shown(client: TestClient) -> None:
    bias = {f"{'0' * 99}{token}": "x" for token in range(8)}
    reply = client.post(CHAT, json=HELLO | {"logit_bias": bias})
    message = reply.json()["message"]
    assert reply.status_code == 400 and len(message) < 1000
    assert message.startswith(f"logit_bias.{'0' * 49}...: Input should be a valid number")
    assert message.endswith("; and 3 more")


def test_a_header_and_a_parameter_are_named_too(client: TestClient) -> None:
    reply = client.post("/score", content=b"prompt", headers={"Content-Type": "text/plain"})
    assert reply.status_code == 400 and reply.json()["message"] == (
        "content-type: Unsupported Media Type: Only 'application/json' is allowed"
    )
    reply = client.post("/flush_cache?timeout=-1")
    assert reply.status_code == 400 and reply.json()["message"] == (
        "timeout: Input should be greater than or equal to 0 (got '-1')"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is empty; send a JSON object"),
        (b'{"messages": [{', "the body is not JSON: "),
    ],
)
def test_what_is_not_json_is_said_to_be_none(
    client: TestClient, content: bytes, message: str
) -> None:
    headers = {"Content-Type": "application/json"}
    reply = client.post(CHAT, content=content, headers=headers)
    assert reply.status_code == 400 and reply.json()["message"].startswith(message)


@pytest.mark.parametrize(
    ("path", "body", "form"),
    [
        ("/v1/responses", {"model": "m", "input": 7}, lambda reply: reply["error"]["message"]),
        ("/v1/messages", HELLO | {"model": "m"}, lambda reply: reply["error"]["message"]),
        ("/api/generate", {"model": "m"}, lambda reply: reply["error"]),
    ],
)
def test_a_route_answers_in_its_own_form_without_files_of_the_server(
    client: TestClient, path: str, body: dict[str, Any], form: Callable[[Any], str]
) -> None:
    reply = client.post(path, json=body)
    field = {"/v1/responses": "input", "/v1/messages": "max_tokens", "/api/generate": "prompt"}[
        path
    ]
    message = form(reply.json())
    assert reply.status_code == 400 and field in message
    assert ".py" not in message and "\n" not in message
