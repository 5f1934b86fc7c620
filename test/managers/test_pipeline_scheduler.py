"""The loop goes on whatever one message does, and leaves nobody unanswered when it ends."""

import itertools
import os
import time
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import zmq
from support.front_model import byte_tokenizer
from support.grammars import setup, vocabulary
from support.pipelines import make_request, new_scheduler

from sgl_pipeline.errors import PipelineLost, ProtocolError, RequestError, StageFailure
from sgl_pipeline.managers import pipeline_scheduler
from sgl_pipeline.managers.front.sglang_io import AbortRequest, ControlRequest, RefusedRoom
from sgl_pipeline.managers.grammars.channel import CompileJob
from sgl_pipeline.managers.grammars.compilation import Compilation
from sgl_pipeline.managers.grammars.queue import GrammarQueue
from sgl_pipeline.managers.grammars.spec import ConstrainedRequest, GrammarSpec
from sgl_pipeline.managers.pipeline_scheduler import PipelineScheduler
from sgl_pipeline.managers.reports.reports import Reports
from sgl_pipeline.managers.reports.trace_files import TraceFiles
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.requests import FinishReason, Request, Room
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import (
    FromWorker,
    PoolSize,
    StageReady,
    StageReport,
    StillLoading,
    WorkerFailed,
)
from sgl_pipeline.wire.stage_orders import OrderReader, SealedOrder
from sgl_pipeline.wire.step_order import StepOrder

# The stage draws token 7: the grammar is any number of the text that this token stands for.
SEVENS = f'root ::= "{byte_tokenizer().decode([7])}"*'


class FakeFront:
    """Hands out scripted messages, one list a turn, and keeps what is answered."""

    def __init__(self, socket: Any, script: list[list[Any]]) -> None:
        self.socket = socket
        self.script = script
        self.live: dict[str, Request] = {}
        self.finished: dict[str, FinishReason] = {}
        self.tokens: list[int] = []

    @property
    def live_requests(self) -> list[Request]:
        return list(self.live.values())

    def receive(self) -> list[Any]:
        messages = self.script.pop(0) if self.script else []
        for message in messages:
            request = message.request if isinstance(message, ConstrainedRequest) else message
            if isinstance(request, Request):
                self.live[request.request_id] = request
        return messages

    def answer_health_checks(self) -> None:
        """There are none."""

    def send_events(self, events: Any) -> None:
        for event in events:
            self.tokens += event.token_ids
            if event.finish is not None:
                self.send_finish(event.request, event.finish)

    def send_finish(self, request: Request, finish: FinishReason) -> None:
        del self.live[request.request_id]
        self.finished[request.request_id] = finish

    def end(self, request: Request) -> None:
        assert request.finish is not None
        self.send_finish(request, request.finish)

    def refuse(self, request: Request, error: Any) -> None:
        self.send_finish(request, FinishReason("abort", None, str(error), error.status_code))


class FakeStages:
    """One stage that answers every plan at once with token 7; `failure` is what `check` raises."""

    stages = range(1)

    def __init__(self, socket: Any) -> None:
        self.channel = SimpleNamespace(socket=socket, readable=[socket])
        self.ends_descriptor = os.eventfd(0)
        self.reports: list[Any] = []
        self.failure: Exception | None = None
        self.blamed: list[tuple[int, str]] = []
        self._orders = OrderReader()

    def broadcast(self, order: SealedOrder) -> None:
        plan = self._orders.open(order)
        assert isinstance(plan, StepOrder)
        token_ids = tuple(7 for chunk in plan.chunks if chunk.samples)
        self.reports.append(
            StageReport(
                stage=0,
                step_id=plan.step_id,
                epoch=0,
                timing=StageTiming(*[0.0] * 7),
                token_ids=token_ids,
            )
        )

    def clock_offsets_s(self) -> dict[int, float]:
        return {}

    def receive(self) -> list[tuple[int, Any]]:
        reports, self.reports = self.reports, []
        return [(0, report) for report in reports]

    def blame(self, worker: int, reason: str) -> None:
        self.blamed.append((worker, reason))
        self.failure = StageFailure(0, None, reason)


class FakeRecovery:
    """Replaces nobody."""

    current = None
    records = ()

    def __init__(self, stages: FakeStages) -> None:
        self._stages = stages

    def take(self, message: Any, now_s: float, worker: int) -> None:
        """As the roster does with what no worker may say now."""
        raise ProtocolError(f"{type(message).__name__} was not due")

    def check(self, now_s: float) -> None:
        if self._stages.failure is not None:
            raise self._stages.failure

    def serve(self, now_s: float) -> None:
        """All stages are there."""

    def settle(self, now_s: float) -> None:
        """No recovery was under way."""

    def is_within_bound(self, now_s: float) -> bool:
        return False


class FakeCompiler:
    """Knows one grammar, which it hands out in the turn that `finish` is called."""

    def __init__(self) -> None:
        self.open_jobs: list[int] = []
        self._answers: list[Any] = []

    def compile(self, kind: str, text: str) -> int:
        self.open_jobs.append(len(self.open_jobs) + 1)
        return self.open_jobs[-1]

    def cancel(self, job_id: int) -> None:
        self.open_jobs.remove(job_id)

    def finish(self) -> None:
        job = CompileJob(self.open_jobs.pop(), "ebnf", SEVENS)
        self._answers.append(Compilation(setup()).run(job))

    def poll(self) -> list[Any]:
        answers, self._answers = self._answers, []
        return answers


class FakeRooms:
    """Opens all rooms but those of `closed` numbers; keeps what it hears of each."""

    def __init__(self, steps: Any, closed: set[int]) -> None:
        self._steps, self._closed = steps, closed
        self.opened_rooms: list[int] = []
        self.refused_rooms: list[tuple[int, str, int]] = []
        self.to_fail: list[Request] = []
        self.num_served = 0
        self.has_news = False

    def check(self, request: Request) -> None:
        if request.room.number in self._closed:
            raise RequestError("the room is in use", 400)

    def opened(self, request: Request, now_s: float) -> None:
        self.opened_rooms.append(request.room.number)

    def refused(self, room: Room, reason: str, status: int, now_s: float) -> None:
        self.refused_rooms.append((room.number, reason, status))

    def serve(self, now_s: float) -> list[Request]:
        self.num_served += 1
        self.has_news = False
        failed, self.to_fail = self.to_fail, []
        for request in failed:
            self._steps.abort(request.request_id, FinishReason("abort", None, "no prompt", 503))
        return failed

    def state(self) -> None:
        """There is none."""


def room_request(number: int, prompt: list[int]) -> Request:
    request = make_request(f"r{number}", prompt, 3)
    request.room = Room(number)
    return request


@pytest.fixture
def parts():
    """Front, stages and steps, with sockets on which something always waits to be read."""
    context = zmq.Context()
    reader, writer = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    reader.bind("inproc://always-ready")
    writer.connect("inproc://always-ready")
    writer.send(b"")
    idle = context.socket(zmq.PULL)
    steps = new_scheduler(num_pages=64, num_stages=1, context_length=128)
    compiler = FakeCompiler()
    yield SimpleNamespace(
        front=FakeFront(reader, []),
        stages=FakeStages(idle),
        steps=steps,
        compiler=compiler,
        operators=SimpleNamespace(
            socket=context.socket(zmq.ROUTER),
            serve=lambda now_s: None,
            on=lambda event: None,
        ),
        grammars=GrammarQueue(compiler, vocabulary(), 1000.0),
        reported=[],
    )
    context.destroy(linger=0)


def run(parts: Any, script: list[list[Any]], recovery: Any = None, rooms: Any = None) -> FakeFront:
    """Runs the loop over `script`, which should end it."""
    parts.front.script = script
    loads = SimpleNamespace(publish=lambda state: parts.reported.append(state.compiling_requests))
    loop = PipelineScheduler(
        parts.front,
        PipelineCore(parts.steps, StagePlan(0, (1,))),
        parts.stages,
        recovery or FakeRecovery(parts.stages),
        parts.grammars,
        parts.operators,
        Reports({}, "off", TraceFiles(), loads),
        None,
        zmq.Poller(),
        rooms,
    )
    # Its control is upstream's message types; here a control message is a call on the loop.
    loop._control = SimpleNamespace(answer=lambda call, now_s: call(loop), poll=lambda now_s: None)
    loop.run()
    return parts.front


HELLO = StageReady(0, "torch", "torch")
BY_CLIENT = FinishReason("abort", message="aborted by the client")
SHUT_DOWN = ControlRequest(lambda loop: loop.shut_down())
WAIT: list[list[Any]] = [[] for _ in range(8)]


def test_a_request_is_served_to_its_end(parts):
    front = run(parts, [[make_request("a", [1, 2, 3], 4)], *WAIT, [SHUT_DOWN]])
    assert front.tokens == [7, 7, 7, 7]
    assert front.finished == {"a": FinishReason("length")}


def test_the_next_step_is_sent_before_the_front_has_the_tokens_of_the_last(parts):
    told_at_plan: list[int] = []
    stages = parts.stages
    run_plan = stages.broadcast

    def broadcast(order: SealedOrder) -> None:
        told_at_plan.append(len(parts.front.tokens))
        run_plan(order)

    stages.broadcast = broadcast
    front = run(parts, [[make_request("a", [1, 2, 3], 4)], *WAIT, [SHUT_DOWN]])
    assert told_at_plan == [0, 0, 1, 2]
    assert front.tokens == [7, 7, 7, 7]


def test_a_request_that_breaks_the_queue_gets_a_500_and_the_next_is_served(parts):
    broken = make_request("broken", [1], 2)
    broken.prompt_ids = None  # type: ignore[assignment]
    front = run(parts, [[broken, make_request("a", [1], 2)], *WAIT, [SHUT_DOWN]])
    assert front.finished["broken"].status_code == 500
    assert front.finished["a"] == FinishReason("length")


def test_a_control_message_that_fails_does_not_end_the_loop(parts):
    fails = ControlRequest(lambda loop: 1 / 0)
    front = run(parts, [[fails], [make_request("a", [1], 2)], *WAIT, [SHUT_DOWN]])
    assert front.finished["a"] == FinishReason("length")


def test_the_other_half_of_a_request_hears_that_it_was_refused(parts):
    rooms = FakeRooms(parts.steps, {2})
    requests = [room_request(1, [1]), room_request(2, [1]), room_request(3, [])]
    front = run(parts, [requests, *WAIT, [SHUT_DOWN]], rooms=rooms)
    assert rooms.opened_rooms == [1]
    assert front.finished["r1"] == FinishReason("length")
    assert front.finished["r2"].status_code == front.finished["r3"].status_code == 400
    assert [(number, status) for number, _, status in rooms.refused_rooms] == [(2, 400), (3, 400)]


def test_the_other_half_hears_of_a_request_that_ends_before_its_grammar_is_there(parts):
    rooms = FakeRooms(parts.steps, set())
    request = room_request(1, [1])
    held = ConstrainedRequest(request, GrammarSpec("ebnf", SEVENS))
    run(parts, [[held], [AbortRequest((request,), BY_CLIENT)], [SHUT_DOWN]], rooms=rooms)
    assert rooms.opened_rooms == [] and rooms.refused_rooms == [(1, "aborted by the client", 500)]


def test_the_other_half_hears_of_a_request_that_could_not_be_read(parts):
    rooms = FakeRooms(parts.steps, set())
    run(parts, [[RefusedRoom(Room(4), "temperature", 400)], [SHUT_DOWN]], rooms=rooms)
    assert rooms.refused_rooms == [(4, "temperature", 400)]
    run(parts, [[RefusedRoom(Room(4), "temperature", 400)], [SHUT_DOWN]])


def test_a_request_that_ends_with_its_room_is_answered(parts):
    rooms = FakeRooms(parts.steps, set())
    request = room_request(1, [1])
    fail = ControlRequest(lambda loop: rooms.to_fail.append(request))
    front = run(parts, [[request], [fail], *WAIT, [SHUT_DOWN]], rooms=rooms)
    assert front.finished["r1"].status_code == 503


def test_news_for_rooms_are_told_in_the_turn_that_brought_them(parts):
    rooms = FakeRooms(parts.steps, set())
    orders = parts.stages.broadcast

    def broadcast(order: SealedOrder) -> None:
        rooms.has_news = True
        orders(order)

    parts.stages.broadcast = broadcast
    run(parts, [[room_request(1, [1])], [SHUT_DOWN]], rooms=rooms)
    assert rooms.num_served == 4  # two turns, each of which sent a step


def test_an_abort_ends_its_request_alone(parts):
    first, second = make_request("a", [1], 50), make_request("b", [1], 3)
    finish = FinishReason("abort", message="not wanted any more")
    front = run(parts, [[first, second], [AbortRequest((first,), finish)], *WAIT, [SHUT_DOWN]])
    assert front.finished["a"] is finish
    assert front.finished["b"] == FinishReason("length")
    assert parts.steps.is_idle


def test_a_dead_stage_ends_every_live_request_with_an_error_that_names_it(parts):
    parts.stages.failure = StageFailure(0, 3, "killed by signal 9")
    with pytest.raises(StageFailure):
        run(parts, [[make_request("a", [1], 50), make_request("b", [1], 50)]])
    assert {finish.status_code for finish in parts.front.finished.values()} == {500}
    assert "stage 0 failed after step 3" in parts.front.finished["b"].message


def test_without_enough_stages_who_waits_and_who_comes_late_is_told_to_come_again(
    parts, monkeypatch
):
    monkeypatch.setattr(pipeline_scheduler, "LAST_ANSWERS_S", 0.2)
    parts.stages.failure = PipelineLost("no stage is left")
    late = [[], [make_request("late", [1], 50)]]
    with pytest.raises(PipelineLost):
        run(parts, [[make_request("a", [1], 50)], *late])
    assert set(parts.front.finished) == {"a", "late"}
    assert {finish.status_code for finish in parts.front.finished.values()} == {503}
    assert "no stage is left" in parts.front.finished["late"].message


def test_a_stage_that_says_what_it_may_not_is_to_blame(parts):
    parts.stages.reports.append(StageReady(0, "torch", "torch"))
    # It cannot be replaced here.
    with pytest.raises(StageFailure, match="StageReady"):
        run(parts, [[make_request("a", [1], 50)]])
    assert parts.stages.blamed == [(0, "StageReady was not due")]
    assert parts.front.finished["a"].status_code == 500


def test_all_that_a_turn_does_is_at_one_moment_and_its_steps_are_later(parts, monkeypatch):
    ticks = itertools.count(1000)
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr(pipeline_scheduler, "time", clock)
    # A message of the worker and the end of its process come in every turn.
    parts.stages.receive, receive = lambda: [(0, HELLO), *receive()], parts.stages.receive
    os.eventfd_write(parts.stages.ends_descriptor, 1)
    turns: list[set[float]] = []
    scheduled: list[float] = []

    def note(name: str) -> Any:
        def at(*arguments: Any) -> None:
            turns.extend([set()] if name == "take" else [])
            turns[-1] |= {one for one in arguments if isinstance(one, float)}

        return at

    recovery = FakeRecovery(parts.stages)
    for name in ("take", "check", "serve", "settle"):
        monkeypatch.setattr(recovery, name, note(name))
    parts.operators.serve, parts.steps.end_overdue = (
        note("serve"),
        lambda now_s: note("end")(now_s) or [],
    )
    next_microbatch = parts.steps.next_microbatch
    parts.steps.next_microbatch = lambda now_s: scheduled.append(now_s) or next_microbatch(now_s)
    run(parts, [[make_request("a", [1, 2, 3], 4)], *WAIT, [SHUT_DOWN]], recovery)
    assert len(turns) == len(WAIT) + 2 and {len(moments) for moments in turns} == {1}
    first = [min(moments) for moments in turns]
    assert first == sorted(first) and len(set(first)) == len(first)
    # Two looks for a step in the first turn: one was there, and one was not.
    assert first[0] < scheduled[0] < scheduled[1] < first[1]


def test_every_message_of_a_worker_has_a_handler_but_those_that_the_launcher_keeps(parts):
    tables: list[set[type]] = []
    look = ControlRequest(lambda loop: tables.append(set(loop._from_worker)))
    run(parts, [[look], [SHUT_DOWN]])
    assert tables == [set(get_args(FromWorker)) - {StillLoading, WorkerFailed}]


def test_a_worker_that_sends_an_order_is_to_blame(parts):
    parts.stages.reports.append(PoolSize(3))
    with pytest.raises(StageFailure, match="PoolSize"):
        run(parts, [[]])
    assert parts.stages.blamed == [(0, "a worker that serves sent PoolSize")]


def test_a_message_of_no_known_type_is_logged_and_the_next_request_served(parts, caplog):
    front = run(parts, [["hello", make_request("a", [1], 2)], *WAIT, [SHUT_DOWN]])
    assert front.finished["a"] == FinishReason("length")
    assert "could not be handled: 'hello'" in caplog.text


def test_a_shutdown_answers_who_is_still_being_served(parts):
    front = run(parts, [[make_request("a", [1], 50)], [SHUT_DOWN]])
    assert front.finished["a"].status_code == 503


def constrained(name: str, num_tokens: int) -> ConstrainedRequest:
    return ConstrainedRequest(make_request(name, [1], num_tokens), GrammarSpec("ebnf", SEVENS))


def test_a_request_whose_grammar_is_compiled_holds_up_nobody_and_then_runs(parts):
    finish_order = []
    parts.front.send_finish, send_finish = (
        lambda request, finish: (
            finish_order.append((request.request_id, parts.steps.load().step_id)),
            send_finish(request, finish),
        ),
        parts.front.send_finish,
    )
    compile_now = ControlRequest(lambda loop: parts.compiler.finish())
    plain = [make_request(name, [1], 5) for name in "bcd"]
    front = run(
        parts,
        [[constrained("a", 3), *plain], *WAIT, [compile_now], *WAIT, [SHUT_DOWN]],
    )
    # Three requests of five tokens together took the steps that they would take by themselves.
    assert finish_order == [("b", 5), ("c", 5), ("d", 5), ("a", 8)]
    assert front.finished["a"] == FinishReason("length")
    assert front.tokens == [7] * 18


def test_load_reports_count_who_waits_for_a_grammar(parts):
    run(parts, [[constrained("a", 3), make_request("b", [1], 2)], [SHUT_DOWN]])
    assert parts.reported[0] == 1


def test_an_abort_during_the_compile_ends_request_and_compile(parts):
    held = constrained("a", 3)
    front = run(parts, [[held], [AbortRequest((held.request,), BY_CLIENT)], *WAIT, [SHUT_DOWN]])
    assert front.finished["a"].message == "aborted by the client"
    assert (parts.compiler.open_jobs, len(parts.grammars)) == ([], 0)


def test_a_shutdown_answers_who_waits_for_a_grammar(parts):
    front = run(parts, [[constrained("a", 3)], [SHUT_DOWN]])
    assert front.finished["a"].status_code == 503


def test_a_full_queue_counts_who_waits_for_a_grammar(parts):
    parts.steps._entry_rules._max_queued_requests = 2
    same = [constrained(name, 3) for name in "abc"]
    front = run(parts, [same, [SHUT_DOWN]])
    assert "--max-queued-requests" in front.finished["c"].message
    assert {front.finished[name].message for name in "ab"} == {"the server is shutting down"}


def test_a_constrained_request_that_can_never_run_is_refused_before_its_compile(parts):
    front = run(parts, [[constrained("a", 1000)], [SHUT_DOWN]])
    assert front.finished["a"].status_code == 400
    assert "--context-length" in front.finished["a"].message


def test_the_waiting_timeout_counts_while_a_grammar_is_compiled(parts):
    parts.grammars._waiting_timeout_s = 1.0
    old = constrained("a", 3)
    old.request.arrival_s = time.monotonic() - 2.0
    front = run(parts, [[old], *WAIT, [SHUT_DOWN]])
    assert front.finished["a"].message == "Request waiting timeout reached."
    assert parts.compiler.open_jobs == []


def test_the_cache_is_not_flushed_while_a_grammar_is_compiled(parts):
    states = []
    look = ControlRequest(lambda loop: states.append(loop.flush_cache()))
    held = constrained("a", 3)
    run(
        parts,
        [[look], [held], [look], [AbortRequest((held.request,), BY_CLIENT)], [look], [SHUT_DOWN]],
    )
    assert states == [True, False, True]
