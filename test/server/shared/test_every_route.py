"""Every route of SGLang's HTTP server is answered in time: served, or a 4xx that says why not."""

import http.client
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import requests
from sglang.srt.entrypoints import http_server
from support.live_server import LiveServer
from support.minimal_messages import minimal_fields

pytestmark = pytest.mark.multiproc

ROUTE_TIMEOUT_S = 90.0
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
GENERATE = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
SCORE = {"model": "m", "query": "a", "items": ["b"], "label_token_ids": [1, 2]}
QUESTION = {"id": "q", "type": "yes_no", "question": "b?"}
# Bodies of the routes whose types are not upstream's internal messages.
BODIES: dict[str, dict[str, Any]] = {
    "/generate": GENERATE,
    "/encode": {"text": "a"},
    "/classify": {"text": "a"},
    "/v1/completions": {"model": "m", "prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/embeddings": {"model": "m", "input": "a"},
    "/v1/classify": {"model": "m", "input": "a"},
    "/tokenize": {"model": "m", "prompt": "a"},
    "/v1/tokenize": {"model": "m", "prompt": "a"},
    "/detokenize": {"model": "m", "tokens": [100, 101]},
    "/v1/detokenize": {"model": "m", "tokens": [100, 101]},
    "/v1/score": SCORE,
    "/v1/decisions": {"model": "m", "input": "a", "questions": [QUESTION]},
    "/v1/responses": {"model": "m", "input": "a", "max_output_tokens": 2},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    "/api/chat": {"model": "m", "messages": CHAT["messages"], "stream": False},
    "/api/generate": {"model": "m", "prompt": "a", "stream": False},
    "/api/show": {"model": "m"},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": "m", "messages": CHAT["messages"]},
    "/invocations": CHAT,
    "/vertex_generate": {"instances": [{"text": "a"}], "parameters": {"sampling_params": {}}},
    "/parse_function_call": {"text": "x", "tools": [], "tool_call_parser": "qwen25"},
    "/separate_reasoning": {"text": "x", "reasoning_parser": "qwen3"},
}
# The routes that this server has. What is not among them may be refused, with a reason.
SERVED = {
    *("/ready", "/health", "/health_generate", "/ping", "/", "/v1/loads"),
    *("/get_model_info", "/model_info", "/get_server_info", "/server_info", "/v1/models"),
    *("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/invocations"),
    *("/vertex_generate", "/api/chat", "/api/generate", "/api/tags", "/api/show"),
    *("/v1/messages/count_tokens", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
    *("/parse_function_call", "/separate_reasoning"),
    *("/flush_cache", "/abort_request", "/pause_generation", "/continue_generation"),
    *("/start_profile", "/stop_profile"),
    *("/freeze_gc", "/configure_logging", "/update_weight_version"),
    "/get_hicache_l3_cache_layout",
}


def all_routes() -> Iterator[tuple[str, str, Any]]:
    """Method, path and body of every HTTP route, those of included routers among them."""
    for route in http_server.app.routes:
        included = getattr(route, "original_router", None)
        for one in [route] if included is None else included.routes:
            for method in sorted(getattr(one, "methods", None) or ()):
                yield method, one.path, minimal_body(one)


def minimal_body(route: Any) -> dict[str, Any]:
    if route.path in BODIES:
        return BODIES[route.path]
    dependant = getattr(route, "dependant", None)
    for parameter in dependant.body_params if dependant is not None else ():
        kind = parameter.field_info.annotation
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return dict(msgspec.to_builtins(minimal_fields(kind)))
    return {}


def ask(server: LiveServer, method: str, path: str, body: Any) -> requests.Response:
    address = server.url + path.replace("{", "").replace("}", "").replace(":path", "")
    if path == "/v1/audio/transcriptions":
        files, fields = {"file": ("a.wav", b"RIFF")}, {"model": "m"}
        return requests.post(address, files=files, data=fields, timeout=ROUTE_TIMEOUT_S)
    return requests.request(method, address, json=body, timeout=ROUTE_TIMEOUT_S)


def test_every_route_is_served_or_refused_with_a_4xx(demo_server: LiveServer, tmp_path) -> None:
    wrong, served = [], set()
    for method, path, body in all_routes():
        if path == "/start_profile":
            body = {"output_dir": str(tmp_path)}
        try:
            answer = ask(demo_server, method, path, body)
        except requests.Timeout:
            wrong.append(f"{method} {path}: no answer within {ROUTE_TIMEOUT_S:g} s")
            continue
        if answer.status_code == 200:
            served.add(path)
        elif not (400 <= answer.status_code < 500 and answer.text):
            wrong.append(f"{method} {path}: {answer.status_code} {answer.text[:200]}")
    assert wrong == []
    assert sorted(SERVED - served) == []
    assert demo_server.generate(**GENERATE).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/parse_function_call", {"text": "x", "tools": [], "tool_call_parser": "none such"}),
        ("/separate_reasoning", {"text": "x", "reasoning_parser": "none such"}),
        ("/vertex_generate", {"instances": [{"text": "a"}], "parameters": {"max_new_tokens": 2}}),
        ("/pause_generation", {"mode": "for a while"}),
    ],
)
def test_what_is_wrong_with_a_body_is_a_4xx(demo_server: LiveServer, path, body) -> None:
    answer = ask(demo_server, "POST", path, body)
    assert 400 <= answer.status_code < 500, answer.text


def test_a_web_socket_is_answered(demo_server: LiveServer) -> None:
    """/v1/realtime transcribes audio, which needs an audio model."""
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    connection = http.client.HTTPConnection("127.0.0.1", demo_server.port, timeout=ROUTE_TIMEOUT_S)
    connection.request("GET", "/v1/realtime", headers=upgrade)
    status = connection.getresponse().status
    connection.close()
    assert status == 101 or 400 <= status < 500
    assert demo_server.generate(**GENERATE).status_code == 200
