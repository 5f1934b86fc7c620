import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from sgl_pipeline.managers import route_guard
from sgl_pipeline.managers.openai_fields import ServedFeatures
from sgl_pipeline.managers.route_guard import REFUSED_ROUTES, RouteGuard


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

    @app.post("/slow_down")
    async def unreachable() -> None:
        raise AssertionError

    @app.post("/separate_reasoning")
    @app.post("/v1/tokenize")
    async def fails() -> None:
        raise ValueError("no such parser")

    features = ServedFeatures(parses_tool_calls=False, has_completion_template=False)
    app.add_middleware(RouteGuard, features=features, is_stopping=lambda: bool(is_stopping))
    return TestClient(app, raise_server_exceptions=False)


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


def test_a_handler_that_lets_a_bad_request_escape_gives_a_400_and_a_bug_stays_a_500(
    client: TestClient,
) -> None:
    reply = client.post("/separate_reasoning")
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "no such parser")
    assert client.post("/v1/tokenize").status_code == 500


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
