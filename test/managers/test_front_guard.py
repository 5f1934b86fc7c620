import asyncio
import builtins
import threading
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request, WebSocket
from fastapi.testclient import TestClient
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.load_snapshot import (
    LoadSnapshot,
    ShmLoadSnapshotReader,
    ShmLoadSnapshotWriter,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.auth import add_api_key_middleware
from starlette.websockets import WebSocketDisconnect

from sgl_pipeline.managers import front_guard
from sgl_pipeline.managers.entrance_checks import RefusedRequestError
from sgl_pipeline.managers.front_guard import (
    REFUSED_ROUTES,
    GuardedTokenizerManager,
    guard_routes,
)
from sgl_pipeline.managers.openai_fields import ServedFeatures


def request(text: Any = "x", **sampling: Any) -> GenerateReqInput:
    return GenerateReqInput(text=text, sampling_params=sampling)


def aborted(status_code: int | None) -> dict[str, Any]:
    finish = {"type": "abort", "message": "too long", "status_code": status_code}
    return {"text": "", "meta_info": {"finish_reason": finish}}


def replies_of(*replies: dict[str, Any] | Exception, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the guarded manager passes on when upstream's yields `replies`."""

    async def scripted(self: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
            yield reply

    monkeypatch.setattr(TokenizerManager, "generate_request", scripted)
    manager = GuardedTokenizerManager.__new__(GuardedTokenizerManager)
    manager.context_len = 100

    async def collect() -> list[Any]:
        return [reply async for reply in manager.generate_request(request())]

    return asyncio.run(collect())


def test_a_request_that_upstream_trips_over_is_refused_and_a_late_error_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RefusedRequestError, match="cannot be read: wibble"):
        replies_of(TypeError("wibble"), monkeypatch=monkeypatch)
    with pytest.raises(TypeError):
        replies_of({"text": "a"}, TypeError("wibble"), monkeypatch=monkeypatch)


def test_a_refusal_before_any_token_is_an_error_even_for_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="too long") as caught:
        replies_of(aborted(503), monkeypatch=monkeypatch)
    assert getattr(caught.value, "status_code", None) == 503


def test_an_error_in_mid_stream_carries_the_status_that_upstream_looks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = {"text": "a", "meta_info": {"finish_reason": None}}
    passed = replies_of(token, aborted(500), monkeypatch=monkeypatch)
    assert passed[0] is token
    status = passed[1]["meta_info"]["finish_reason"]["status_code"]
    assert isinstance(status, HTTPStatus) and status == 500


def test_an_abort_by_the_client_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(replies_of(aborted(None), monkeypatch=monkeypatch)) == 1


def test_loads_are_read_and_an_unknown_section_is_an_error_in_time(tmp_path: Path) -> None:
    path = str(tmp_path / "loads")
    manager = GuardedTokenizerManager.__new__(GuardedTokenizerManager)
    manager.auto_create_handle_loop = lambda: None
    manager.load_snapshot_reader = ShmLoadSnapshotReader(path, dp_size=1)
    assert asyncio.run(manager.get_loads()) == []
    writer = ShmLoadSnapshotWriter(path, dp_size=1, dp_rank=0)
    writer.write(LoadSnapshot(num_waiting_reqs=3))
    (load,) = asyncio.run(manager.get_loads(["core"]))
    assert load.num_waiting_reqs == 3
    with pytest.raises(ValueError, match="include: everything"):
        asyncio.run(manager.get_loads(["everything"]))
    writer.close()


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()

    @app.post("/generate")
    async def echo(request: Request) -> int:
        return len(await request.body())

    app.post("/v1/chat/completions")(echo)

    @app.post("/pause_generation")
    async def unreachable() -> None:
        raise AssertionError

    @app.post("/trip")
    async def trip(name: str) -> None:
        raise getattr(builtins, name)("wibble")

    @app.websocket("/v1/realtime")
    async def open_to_all(socket: WebSocket) -> None:
        await socket.accept()

    features = ServedFeatures(parses_tool_calls=False, has_completion_template=False)
    guard_routes(app, context_length=100, features=features)
    return TestClient(app)


def test_a_route_that_is_not_built_is_a_400_that_names_the_feature(client: TestClient) -> None:
    reply = client.post("/pause_generation")
    assert reply.status_code == 400
    assert "pausing generation" in reply.json()["error"]["message"]


def test_refused_routes_exist_upstream() -> None:
    from sglang.srt.entrypoints import http_server, v1_loads

    routes = [*http_server.app.routes, *v1_loads.router.routes]
    assert set(REFUSED_ROUTES) <= {getattr(route, "path", None) for route in routes}


def test_a_body_within_the_limit_passes_and_a_larger_one_is_a_413(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_guard, "MAX_BODY_BYTES", 1000)
    assert client.post("/generate", content=b"x" * 1000).json() == 1000
    assert client.post("/generate", content=b"x" * 1001).status_code == 413


def test_the_body_of_a_conversation_is_bound_to_the_context(client: TestClient) -> None:
    allowed = 16 * 100 + front_guard.CONVERSATION_OVERHEAD_BYTES
    assert client.post("/v1/chat/completions", content=b"x" * allowed).json() == allowed
    assert client.post("/v1/chat/completions", content=b"x" * (allowed + 1)).status_code == 413


def test_a_websocket_is_turned_away(client: TestClient) -> None:
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
        pass


def test_a_body_that_upstream_trips_over_is_the_clients_mistake(client: TestClient) -> None:
    for name in ("TypeError", "AttributeError", "IndexError", "KeyError", "AssertionError"):
        reply = client.post("/trip", params={"name": name})
        assert reply.status_code == 400
        assert "cannot be read: wibble" in reply.json()["error"]["message"].replace("'", "")
    assert client.post("/trip", params={"name": "ValueError"}).status_code == 400
    with pytest.raises(OSError):
        client.post("/trip", params={"name": "OSError"})


def test_a_key_outside_ascii_is_no_key_and_other_crashes_are_the_servers() -> None:
    app = FastAPI()

    @app.get("/crash")
    async def crash() -> None:
        raise OSError

    app.add_exception_handler(Exception, front_guard.answer_crash)
    add_api_key_middleware(app, api_key="key", admin_api_key=None)
    client = TestClient(app, raise_server_exceptions=False)
    for key, status in ((b"k\xe9y", 401), (b"other", 401), (b"key", 500)):
        reply = client.get("/crash", headers={"Authorization": b"Bearer " + key})
        assert reply.status_code == status


class _Tokenizer:
    """Notes the thread that it runs in."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread())
        return [5]


def test_a_long_text_is_tokenized_beside_the_event_loop() -> None:
    manager = GuardedTokenizerManager.__new__(GuardedTokenizerManager)
    manager.tokenizer = _Tokenizer()
    manager.async_dynamic_batch_tokenizer = None
    manager.model_config = SimpleNamespace(is_embedding_gemma=False)
    for text in ("x", "x" * front_guard.LONG_TEXT_CHARACTERS):
        assert asyncio.run(manager._tokenize_texts(text)) == ([5], None)
    short, long = manager.tokenizer.threads
    assert short is threading.main_thread() and long is not short
