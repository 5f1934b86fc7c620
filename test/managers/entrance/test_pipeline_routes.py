"""The routes read bodies strictly, ask the scheduler process, and hand its answer on."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import zmq
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware
from support.live_server import wait_until

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.channels import operator_channel
from sgl_pipeline.managers.channels.operator_channel import (
    ChangeThrottle,
    ExplainRequest,
    MoveLayers,
    OperatorAnswer,
    OperatorSocket,
    ShowPlan,
    ShowThrottle,
    UndoMove,
    UndoThrottle,
    operator_address,
)
from sgl_pipeline.managers.entrance import pipeline_routes
from sgl_pipeline.managers.entrance.pipeline_routes import PlanChange, add_pipeline_routes
from sgl_pipeline.managers.entrance.route_guard import guard_routes
from sgl_pipeline.managers.entrance.throttle_body import KNOBS, ServerKeys, read_body
from sgl_pipeline.managers.upstream.openai_fields import ServedFeatures
from sgl_pipeline.records.throttle_change import Author

CONTEXT_LENGTH = 100


class Scheduler:
    """The scheduler process's end, in a thread: keeps what is asked, answers with `answer` while
    `is_open` is set."""

    def __init__(self, address: str) -> None:
        self.asked: list[Any] = []
        self.answer: OperatorAnswer | None = OperatorAnswer(200, b'{"layer_counts":[3,1]}')
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = OperatorSocket(self._context, address)
        self.is_open = threading.Event()
        self.is_open.set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self.is_open.set()
        self._thread.join(10)
        self._socket.close()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        askers: list[bytes] = []
        while not self._is_over.is_set():
            self._socket.socket.poll(20)
            while (received := self._socket.receive()) is not None:
                askers.append(received[0])
                self.asked.append(received[1])
            while askers and self.is_open.is_set():
                asker = askers.pop()
                if self.answer is not None:
                    self._socket.answer(asker, self.answer)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    scheduler = Scheduler(operator_address(str(tmp_path)))
    yield scheduler
    scheduler.close()


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    """As `launch_server.py` puts it together, before upstream adds the keys."""
    app = FastAPI()
    add_pipeline_routes(app, operator_address(str(tmp_path)), move_timeout_s=60.0)
    features = ServedFeatures(parses_tool_calls=False, has_completion_template=False)
    app.state.is_stopping = False
    guard_routes(app, CONTEXT_LENGTH, features, is_stopping=lambda: app.state.is_stopping)
    return app


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    # One event loop for all requests, as in the server.
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def test_an_answer_is_handed_on_with_its_status(client: TestClient, scheduler: Scheduler) -> None:
    reply = client.get("/pipeline/plan")
    assert (reply.status_code, reply.json()) == (200, {"layer_counts": [3, 1]})
    assert reply.headers["content-type"] == "application/json"
    scheduler.answer = OperatorAnswer(409, b'{"error":{"message":"layers move"}}')
    reply = client.post("/pipeline/plan", json={"layer_counts": [3, 1]})
    assert (reply.status_code, reply.json()) == (409, {"error": {"message": "layers move"}})


@pytest.mark.parametrize(
    ("body", "question"),
    [
        ({"layer_counts": [3, 1, 3]}, MoveLayers((3, 1, 3), preview=False)),
        ({"layer_counts": [3, 1], "preview": True}, MoveLayers((3, 1), preview=True)),
        ({"layer_counts": [3, 1], "undo": False}, MoveLayers((3, 1), preview=False)),
        ({"undo": True}, UndoMove(preview=False)),
        ({"undo": True, "preview": True}, UndoMove(preview=True)),
        ({"undo": True, "layer_counts": None}, UndoMove(preview=False)),
    ],
)
def test_a_body_becomes_a_question(
    client: TestClient, scheduler: Scheduler, body: dict[str, Any], question: Any
) -> None:
    assert client.post("/pipeline/plan", json=body).status_code == 200
    assert scheduler.asked == [question]


@pytest.mark.parametrize("rid", ["7f3a", "a b", "team/one", "\u00e4\u20ac"])
def test_any_request_id_can_be_asked_for(
    client: TestClient, scheduler: Scheduler, rid: str
) -> None:
    assert client.get(f"/pipeline/explain/{quote(rid, safe='')}").status_code == 200
    assert scheduler.asked == [ExplainRequest(rid)]


HOSTILE_BODIES = {
    "nothing": (b"", "truncated"),
    "no JSON": (b"layers please", "malformed"),
    "not UTF-8": (b'{"\xff": 1}', "utf-8"),
    "more than one value": (b'{"undo": true} {"undo": true}', "trailing"),
    "null": (b"null", "got `null`"),
    "a list": (b"[3, 1]", "got `array`"),
    "deep lists": (b"[" * 5000, "got `array`"),
    "deep counts": (b'{"layer_counts": ' + b"[" * 5000, "got `array`"),
    "no change named": (b"{}", "neither of layer_counts and undo"),
    "only a preview": (b'{"preview": true}', "neither of layer_counts and undo"),
    "two changes": (b'{"undo": true, "layer_counts": [3, 1]}', "both of layer_counts and undo"),
    "a field of another spelling": (b'{"layer_count": [3, 1]}', "unknown field `layer_count`"),
    "an unknown field": (b'{"undo": true, "force": true}', "unknown field `force`"),
    "counts as text": (b'{"layer_counts": "3,1"}', "got `str`"),
    "a count as text": (b'{"layer_counts": ["3", 1]}', "got `str` - at `$.layer_counts[0]`"),
    "a truth for a count": (b'{"layer_counts": [true, 1]}', "got `bool`"),
    "a fraction": (b'{"layer_counts": [2.5, 1.5]}', "got `float`"),
    "a whole float": (b'{"layer_counts": [3.0, 1]}', "got `float`"),
    "a negative count": (b'{"layer_counts": [5, -1]}', ">= 0 - at `$.layer_counts[1]`"),
    "a huge count": (b'{"layer_counts": [%d]}' % 10**40, "<= 1000000"),
    "infinity": (b'{"layer_counts": [1e999]}', "out of range"),
    "not a number": (b'{"layer_counts": [NaN]}', "malformed"),
    "no counts": (b'{"layer_counts": []}', "length >= 1"),
    "many counts": (b'{"layer_counts": [' + b"1," * 500 + b"1]}", "length <= 256"),
    "a number for undo": (b'{"undo": 1}', "got `int` - at `$.undo`"),
    "text for preview": (b'{"undo": true, "preview": "no"}', "got `str` - at `$.preview`"),
}


@pytest.mark.parametrize("name", HOSTILE_BODIES)
def test_a_hostile_body_is_a_400_that_says_how_to_ask(
    client: TestClient, scheduler: Scheduler, name: str
) -> None:
    body, words = HOSTILE_BODIES[name]
    reply = client.post(
        "/pipeline/plan", content=body, headers={"Content-Type": "application/json"}
    )
    text = reply.json()["error"]["message"]
    assert reply.status_code == 400 and words in text and '{"layer_counts": [...]}' in text
    assert scheduler.asked == []


def test_a_plan_change_that_is_read_names_the_field_that_is_wrong() -> None:
    with pytest.raises(RequestError, match=r"\$\.layer_counts\[1\]"):
        read_body(b'{"layer_counts": [1, null]}', PlanChange)


def test_a_body_must_be_called_json_and_be_no_larger_than_a_conversation(
    client: TestClient, scheduler: Scheduler
) -> None:
    """A page of another origin can send text without asking, and JSON not."""
    as_text = {"Content-Type": "text/plain"}
    reply = client.post("/pipeline/plan", content=b'{"undo": true}', headers=as_text)
    assert reply.status_code == HTTPStatus.BAD_REQUEST
    as_json = {"Content-Type": "application/json"}
    reply = client.post("/pipeline/plan", content=b" " * 2**20, headers=as_json)
    assert reply.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    assert scheduler.asked == []


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "HEAD"])
def test_other_methods_are_405s(client: TestClient, method: str) -> None:
    assert client.request(method, "/pipeline/plan").status_code == 405


def test_a_scheduler_that_says_nothing_is_a_504(
    client: TestClient, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.answer = None
    monkeypatch.setattr(pipeline_routes, "ANSWER_TIMEOUT_S", 0.05)
    for reply in (
        client.get("/pipeline/plan"),
        client.post("/pipeline/plan", json={"undo": True, "preview": True}),
    ):
        assert reply.status_code == 504
        assert "within 0.05 s" in reply.json()["error"]["message"]


def test_a_move_may_take_as_long_as_stages_may_and_its_switch(
    tmp_path: Path, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.answer = None
    monkeypatch.setattr(pipeline_routes, "SWITCH_TIMEOUT_S", 0.05)
    app = FastAPI()
    add_pipeline_routes(app, operator_address(str(tmp_path)), move_timeout_s=0.2)
    with TestClient(app) as client:
        reply = client.post("/pipeline/plan", json={"undo": True})
    assert reply.status_code == 504
    text = reply.json()["error"]["message"]
    assert "within 0.25 s" in text and "GET /pipeline/plan" in text


def test_questions_beyond_the_limit_are_503s_and_later_ones_are_answered(
    client: TestClient, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_channel, "MAX_OPEN_QUESTIONS", 2)
    scheduler.is_open.clear()
    with ThreadPoolExecutor(2) as clients:
        open_questions = [clients.submit(client.get, "/pipeline/plan") for _ in range(2)]
        wait_until(lambda: len(scheduler.asked) == 2)
        refused = client.get("/pipeline/plan")
        scheduler.is_open.set()
        assert [one.result().status_code for one in open_questions] == [200, 200]
    assert refused.status_code == 503
    assert "2 questions about the pipeline" in refused.json()["error"]["message"]
    assert client.get("/pipeline/plan").status_code == 200


NOBODY = Author("none", "testclient")


@pytest.mark.parametrize(
    ("body", "question"),
    [
        ({"prefill_spread_steps": 4}, ChangeThrottle({"prefill_spread_steps": 4}, NOBODY)),
        (
            {"pause_free_share": 0, "max_prefill_tokens": None, "revert_after_s": 30},
            ChangeThrottle({"max_prefill_tokens": None, "pause_free_share": 0.0}, NOBODY, 30.0),
        ),
        (
            {"policy": "sarathi", "accounting": "naive", "min_prefill_tokens": 8},
            ChangeThrottle(
                {"policy": "sarathi", "min_prefill_tokens": 8, "accounting": "naive"}, NOBODY
            ),
        ),
        ({"undo": True}, UndoThrottle(NOBODY)),
    ],
)
def test_a_patch_of_the_throttle_becomes_a_question(
    client: TestClient, scheduler: Scheduler, body: dict[str, Any], question: Any
) -> None:
    assert client.patch("/pipeline/throttle", json=body).status_code == 200
    assert client.get("/pipeline/throttle").status_code == 200
    assert scheduler.asked == [question, ShowThrottle()]


def test_the_body_has_every_knob() -> None:
    assert set(KNOBS) == {field.name for field in fields(ThrottleArgs)} | {"accounting"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{}", "no knob is named"),
        (b'{"revert_after_s": 5}', "no knob is named"),
        (b'{"undo": true, "prefill_spread_steps": 4}', "undo stands alone"),
        (b'{"undo": true, "revert_after_s": 4}', "undo stands alone"),
        (b'{"prefill_spread_steps": "4"}', "got `str` - at `$.prefill_spread_steps`"),
        (b'{"prefill_spread_steps": true}', "got `bool`"),
        (b'{"prefill_spread_steps": 2.5}', "got `float`"),
        (b'{"prefill_spread_steps": null}', "got `null`"),
        (b'{"pause_free_share": NaN}', "malformed"),
        (b'{"spread": 4}', "unknown field `spread`"),
        (b"[" * 5000, "got `array`"),
        (b"", "truncated"),
    ],
)
def test_a_hostile_patch_is_a_400_that_says_how_to_ask(
    client: TestClient, scheduler: Scheduler, body: bytes, words: str
) -> None:
    reply = client.patch(
        "/pipeline/throttle", content=body, headers={"Content-Type": "application/json"}
    )
    text = reply.json()["error"]["message"]
    assert reply.status_code == 400 and words in text and "GET /pipeline/throttle" in text
    assert scheduler.asked == []


@pytest.mark.parametrize(
    ("api_key", "admin_key", "kind", "opens"),
    [
        (None, None, "none", {None, "user", "admin"}),
        ("user", None, "api", {"user"}),
        ("user", "admin", "admin", {"admin"}),
        (None, "admin", "admin", {"admin"}),
    ],
)
def test_plan_and_knobs_are_the_admins_and_what_is_asked_names_the_key(
    tmp_path: Path,
    scheduler: Scheduler,
    api_key: str | None,
    admin_key: str | None,
    kind: str,
    opens: set[Any],
) -> None:
    app = FastAPI()
    add_pipeline_routes(app, operator_address(str(tmp_path)), 60.0, ServerKeys(api_key, admin_key))
    if api_key or admin_key:
        add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_key)
    with TestClient(app, raise_server_exceptions=False) as client:
        for key in (None, "user", "admin", "another"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            status = 200 if key in opens or not (api_key or admin_key) else 401
            for path, change in (("/pipeline/plan", "POST"), ("/pipeline/throttle", "PATCH")):
                assert client.get(path, headers=headers).status_code == status
                reply = client.request(change, path, json={"undo": True}, headers=headers)
                assert reply.status_code == status
            explains = 200 if api_key is None or key == api_key else 401
            assert client.get("/pipeline/explain/a", headers=headers).status_code == explains
    authors = {one.author for one in scheduler.asked if isinstance(one, UndoThrottle)}
    assert authors == {Author(kind, "testclient")}  # type: ignore[arg-type]


def test_a_server_that_is_stopping_shows_everything_and_changes_nothing(
    app: FastAPI, client: TestClient, scheduler: Scheduler
) -> None:
    app.state.is_stopping = True
    assert client.post("/pipeline/plan", json={"undo": True}).status_code == 503
    assert client.patch("/pipeline/throttle", json={"undo": True}).status_code == 503
    assert client.get("/pipeline/plan").status_code == 200
    assert client.get("/pipeline/throttle").status_code == 200
    assert scheduler.asked == [ShowPlan(), ShowThrottle()]


def test_each_question_is_one_message_and_says_its_kind(scheduler: Scheduler) -> None:
    """The channel's format: msgpack of a tagged struct."""
    encoded = msgspec.msgpack.encode(MoveLayers((3, 1), preview=True))
    assert msgspec.msgpack.decode(encoded) == {
        "type": "MoveLayers",
        "layer_counts": [3, 1],
        "preview": True,
    }
