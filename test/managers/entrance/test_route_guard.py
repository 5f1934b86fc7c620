import builtins

import pytest
from fastapi import FastAPI, HTTPException, Request, WebSocket
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware
from starlette.websockets import WebSocketDisconnect

from sgl_pipeline.managers.entrance import route_guard
from sgl_pipeline.managers.entrance.retry_after import RETRY_AFTER_S
from sgl_pipeline.managers.entrance.route_guard import guard_routes
from sgl_pipeline.managers.upstream.openai_fields import ServedFeatures
from sgl_pipeline.managers.upstream.refused_features import REFUSED_ROUTES


@pytest.fixture
def is_stopping() -> list[bool]:
    """Whether the guarded server is; to be filled by the test."""
    return []


@pytest.fixture
def client(is_stopping: list[bool]) -> TestClient:
    app = FastAPI()

    @app.get("/health")
    @app.post("/abort_request")
    async def answer() -> str:
        return "answered"

    @app.post("/generate")
    async def echo(request: Request) -> int:
        return len(await request.body())

    @app.post("/full")
    async def refuse() -> None:
        raise HTTPException(503, "full")

    @app.post("/slow_down")
    async def unreachable() -> None:
        raise AssertionError

    app.post("/v1/chat/completions")(echo)

    @app.post("/start_profile")
    @app.post("/trip")
    async def trip(name: str) -> None:
        raise getattr(builtins, name)("wibble")

    @app.exception_handler(HTTPException)
    async def answer_in_own_form(request: Request, error: HTTPException) -> JSONResponse:
        """In the place of upstream's, which is for FastAPI's exception as well."""
        return JSONResponse({"own form": error.detail}, error.status_code)

    @app.websocket("/v1/realtime")
    async def open_to_all(socket: WebSocket) -> None:
        await socket.accept()

    features = ServedFeatures(parses_tool_calls=False, has_completion_template=False)
    guard_routes(app, 100, features, is_stopping=lambda: bool(is_stopping))
    return TestClient(app, raise_server_exceptions=False)


def test_a_503_says_when_to_ask_again(client: TestClient, is_stopping: list[bool]) -> None:
    assert "Retry-After" not in client.get("/health").headers
    assert client.post("/full").headers["Retry-After"] == str(RETRY_AFTER_S)
    assert "Retry-After" not in client.post("/slow_down").headers
    is_stopping.append(True)
    assert client.post("/generate").headers["Retry-After"] == str(RETRY_AFTER_S)


def test_a_route_that_is_not_built_is_a_400_that_names_the_feature(client: TestClient) -> None:
    reply = client.post("/slow_down")
    assert reply.status_code == 400
    assert "slowing down" in reply.json()["error"]["message"]


def test_a_server_that_is_stopping_takes_no_new_work_and_can_still_be_asked(
    client: TestClient, is_stopping: list[bool]
) -> None:
    assert client.post("/generate").status_code == 200
    is_stopping.append(True)
    refused = client.post("/generate")
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    assert client.get("/health").json() == "answered"
    assert client.post("/abort_request").json() == "answered"


def test_a_profile_that_is_refused_is_a_400_and_such_an_error_elsewhere_a_500(
    client: TestClient,
) -> None:
    reply = client.post("/start_profile", params={"name": "RuntimeError"})
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "wibble")
    assert client.post("/trip", params={"name": "RuntimeError"}).status_code == 500


def test_refused_routes_exist_upstream() -> None:
    from sglang.srt.entrypoints import http_server, v1_loads

    routes = [*http_server.app.routes, *v1_loads.router.routes]
    assert set(REFUSED_ROUTES) <= {getattr(route, "path", None) for route in routes}


def test_a_body_within_the_limit_passes_and_a_larger_one_is_a_413(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_guard, "MAX_BODY_BYTES", 1000)
    assert client.post("/generate", content=b"x" * 1000).json() == 1000
    assert client.post("/generate", content=b"x" * 1001).status_code == 413


def test_the_body_of_a_conversation_is_bound_to_the_context(client: TestClient) -> None:
    allowed = 16 * 100 + route_guard.CONVERSATION_OVERHEAD_BYTES
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
    assert client.post("/trip", params={"name": "OSError"}).status_code == 500


def test_a_key_outside_ascii_is_no_key_and_other_crashes_are_the_servers() -> None:
    app = FastAPI()

    @app.get("/crash")
    async def crash() -> None:
        raise OSError

    app.add_exception_handler(Exception, route_guard.answer_crash)
    add_api_key_middleware(app, api_key="key", admin_api_key=None)
    client = TestClient(app, raise_server_exceptions=False)
    for key, status in ((b"k\xe9y", 401), (b"other", 401), (b"key", 500)):
        reply = client.get("/crash", headers={"Authorization": b"Bearer " + key})
        assert reply.status_code == status


def test_what_is_refused_for_its_body_is_told_in_the_form_of_the_route(client: TestClient) -> None:
    reply = client.post("/v1/chat/completions", json={"functions": [{"name": "f"}]})
    assert reply.status_code == 400
    assert reply.json() == {"own form": "functions: use tools"}
    reply = client.post("/v1/chat/completions", content=b" " * 2**20)
    assert reply.status_code == 413
    assert "larger than" in reply.json()["own form"]
