"""A worker launches the next step while the last one's tokens are on their way, and no more."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from support.assignments import tiny_assignment
from support.late_tail import LateTail
from support.local_pipeline import QueueLink, open_stage
from support.page_transfers import NOWHERE
from support.tiny_models import tiny_model

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner import stage_worker
from sgl_pipeline.pp_runner.layer_moves.layer_mover import LayerMover
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape, NeighborGone
from sgl_pipeline.pp_runner.links.page_link import StagePageLinks
from sgl_pipeline.pp_runner.open_transfers import open_transfers
from sgl_pipeline.pp_runner.output.output_tail import Tail
from sgl_pipeline.pp_runner.ready_stage import ReadyStage
from sgl_pipeline.pp_runner.stage_profile import StageProfile
from sgl_pipeline.pp_runner.stage_runner import StageRunner
from sgl_pipeline.pp_runner.stage_site import StageSite
from sgl_pipeline.pp_runner.stage_worker import StageWorker, exit_code_of
from sgl_pipeline.pp_runner.worker_hello import WorkerSite
from sgl_pipeline.pp_runner.worker_inbox import WorkerInbox
from sgl_pipeline.requests import GREEDY
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import SwitchPlan
from sgl_pipeline.wire.stage_messages import (
    FinishHandover,
    MeasureCosts,
    PoolSize,
    ProfileReply,
    Regroup,
    Regrouped,
    Shutdown,
    StageAssignment,
    StageReport,
    StartProfile,
    StillLoading,
    StopProfile,
    ToWorker,
    WorkerFailed,
)
from sgl_pipeline.wire.stage_orders import OrderStream, SealedOrder, StageOrder
from sgl_pipeline.wire.step_order import ChunkOrder, MirrorSnapshot, RequestOpen, StepOrder

NEVER = 10**9  # looks until a result is there: it must be waited for
NOTHING = None  # no message has arrived


class ScriptedChannel:
    """Gives `messages` one after the other; NOTHING is an empty socket to who does not wait."""

    def __init__(self, log: list[str], messages: Sequence[ToWorker | None]) -> None:
        self.sent: list[Any] = []
        self.timeouts: list[int | None] = []
        self._log = log
        self._messages = deque(messages)

    def send(self, message: Any) -> None:
        kind = type(message).__name__
        self._log.append(f"report {message.step_id}" if isinstance(message, StageReport) else kind)
        self.sent.append(message)

    def wait(self, descriptors: Iterable[int], timeout_s: float | None = None) -> None:
        self._log.append("wait")

    def receive(self, timeout_ms: int | None = None) -> ToWorker | None:
        self.timeouts.append(timeout_ms)
        if timeout_ms is not None and not self._messages:
            return NOTHING
        message = self._messages.popleft()
        while timeout_ms is None and message is NOTHING:
            message = self._messages.popleft()
        return message


class Stage:
    """A worker that is ready, as stage 1 of 2 with `tail`, or as the only one with its own."""

    def __init__(
        self, messages: Sequence[ToWorker | None], tail: Callable[[list[str]], Tail] | None
    ) -> None:
        self.log: list[str] = []
        self.channel = ScriptedChannel(self.log, messages)
        self.rows: deque = deque()
        plan, stage = (StagePlan(0, (6,)), 0) if tail is None else (StagePlan(0, (3, 3)), 1)
        self.runner: StageRunner = open_stage(
            tiny_model("llama"),
            plan,
            stage,
            QueueLink(self.rows, deque()),
            tail=tail and tail(self.log),
        )
        site = StageSite(self.runner, (), 6, lambda timeout_s: None)
        links = StagePageLinks(("unix:nowhere",) * 2, stage, site.row_bytes, "")
        self.mover = LayerMover(stage, plan, site, links, self.channel.send, time.monotonic)
        self.transfers = open_transfers(self.runner, self.mover, NOWHERE)
        self.worker = StageWorker(self.channel, 0, WorkerSite("run"))  # type: ignore[arg-type]

    def serve(self) -> list[str]:
        """What happened, in order."""
        self.worker.serve(self.runner, self.mover, self.transfers, StageProfile(0, has_gpu=False))
        return self.log


def steps(count: int) -> list[ToWorker]:
    """Each is one token of a request of its own."""
    stream = OrderStream()
    return [stream.seal(step_plan(step_id)) for step_id in range(count)]


def step_plan(step_id: int) -> StepOrder:
    one, page = b"\1\0\0\0", b"\0\0\0\0"
    opened, chunk = RequestOpen(step_id, GREEDY, 1), ChunkOrder(step_id, 0, 1, True, one, page)
    return StepOrder(step_id, 0, (), (opened,), (chunk,))


def late_stage(messages: Sequence[ToWorker | None], *looks: int) -> Stage:
    """Tokens of step n are there when they have been looked for `looks[n]` times."""
    stage = Stage(messages, lambda log: LateTail(log, looks))
    stage.rows.extend((step_id, torch.ones(1, 64)) for step_id in range(len(looks)))
    return stage


@pytest.mark.parametrize(("interval_s", "least", "most"), [(0.0, 10, 100), (1000.0, 1, 1)])
def test_a_worker_says_while_it_loads_that_it_gets_on(
    interval_s: float, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_worker, "PROGRESS_INTERVAL_S", interval_s)
    monkeypatch.setattr(stage_worker, "pin_threads", lambda threads, cores: None)
    assignment = tiny_assignment(0, 6)
    log: list[str] = []
    channel = ScriptedChannel(log, [assignment, PoolSize(16), Shutdown()])
    StageWorker(channel, 7, WorkerSite("run")).run()  # type: ignore[arg-type]
    words = [message for message in channel.sent if isinstance(message, StillLoading)]
    assert least <= len(words) <= most and words[0] == StillLoading(7)
    # The output head is read last.
    counts = [word.num_layers for word in words]
    assert counts == sorted(counts)
    assert counts[-1] == (6 if interval_s == 0.0 else 0)
    others = [word for word in log if word != "StillLoading"]
    assert others == ["WorkerHello", "StageLoaded", "StageReady"]
    # It rehearses three steps before it is ready.
    assert log[-4:-1] == ["StillLoading"] * 3 or interval_s > 0.0


def test_the_next_step_is_launched_while_tokens_are_on_their_way() -> None:
    stage = late_stage([*steps(2), *[NOTHING] * 9, Shutdown()], 8, 5)
    assert stage.serve() == [
        "draw 0", "draw 1", "result 0", "report 0", "result 1", "report 1",
    ]  # fmt: skip
    assert [report.token_ids for report in stage.channel.sent] == [(0,), (1,)]


def test_reports_go_out_in_order_though_a_later_step_is_ready_first() -> None:
    stage = late_stage([*steps(2), *[NOTHING] * 9, Shutdown()], 8, 0)
    log = stage.serve()
    assert log.index("report 0") < log.index("report 1")
    assert log.index("draw 1") < log.index("report 0")


def test_tokens_that_are_there_are_reported_before_the_next_step_is_launched() -> None:
    stage = late_stage([*steps(2), Shutdown()], 1, 1)
    assert stage.serve()[:4] == ["draw 0", "result 0", "report 0", "draw 1"]


def test_a_third_step_waits_for_the_first() -> None:
    stage = late_stage([*steps(4), Shutdown()], *[NEVER] * 4)
    log = stage.serve()
    assert log[:5] == ["draw 0", "draw 1", "result 0", "report 0", "draw 2"]
    assert log[5:8] == ["result 1", "report 1", "draw 3"]
    assert log[8:] == ["result 2", "report 2", "result 3", "report 3"]


def test_no_report_waits_for_the_activations_of_the_next_step() -> None:
    """Upstream sends those of step 1 only when step 0 has been reported."""
    stage = late_stage([*steps(2), Shutdown()], 5, 0)
    second = stage.rows.pop()
    stage.channel.send = _then(stage.channel.send, lambda: stage.rows.append(second))
    assert stage.serve()[:4] == ["draw 0", "result 0", "report 0", "draw 1"]


def _then(send: Callable[[Any], None], act: Callable[[], None]) -> Callable[[Any], None]:
    def both(message: Any) -> None:
        send(message)
        act()

    return both


def test_a_worker_that_has_nothing_pending_waits_for_a_message() -> None:
    stage = late_stage([NOTHING, *steps(1), NOTHING, NOTHING, Shutdown()], 2)
    stage.serve()
    assert stage.channel.timeouts[0] is None
    assert 0 in stage.channel.timeouts
    assert stage.channel.timeouts[-1] is None


def test_on_a_cpu_nothing_is_ever_pending() -> None:
    stage = Stage([*steps(3), Shutdown()], None)
    assert stage.serve() == ["report 0", "report 1", "report 2"]
    assert stage.channel.timeouts == [None] * 4


@pytest.mark.parametrize("order", [MirrorSnapshot((), ()), None], ids=["an order", "shutdown"])
def test_whatever_is_no_step_waits_for_pending_ones(order: MirrorSnapshot | None) -> None:
    messages = steps(2)
    if order is not None:
        stream = OrderStream()
        for _ in range(2):
            stream.start_over(MirrorSnapshot((), ()))
        messages.append(stream.start_over(order))
    stage = late_stage([*messages, Shutdown()], NEVER, NEVER)
    restored: list[int] = []
    restore = stage.runner.restore
    stage.runner.restore = _then(restore, lambda: restored.append(len(stage.channel.sent)))  # type: ignore[method-assign]
    log = stage.serve()
    assert log[-4:] == ["result 0", "report 0", "result 1", "report 1"]
    assert restored == ([2] if order is not None else [])


def profile_of(path: Path, num_steps: int | None) -> StartProfile:
    return StartProfile(
        path=str(path / "trace.json.gz"),
        activities=("CPU",),
        with_stack=False,
        record_shapes=False,
        num_steps=num_steps,
    )


def test_a_reply_to_a_profile_request_waits_for_pending_steps(tmp_path: Path) -> None:
    first, second, third = steps(3)
    start, stop = profile_of(tmp_path, None), StopProfile()
    stage = late_stage([first, start, second, third, stop, Shutdown()], *[NEVER] * 3)
    log = stage.serve()
    assert [entry for entry in log if not entry.startswith("result")] == [
        "draw 0", "report 0", "ProfileReply",
        "draw 1", "draw 2", "report 1", "report 2", "ProfileReply",
    ]  # fmt: skip
    replies = [message for message in stage.channel.sent if isinstance(message, ProfileReply)]
    assert [reply.is_recording for reply in replies] == [True, False]


def test_a_profile_of_some_steps_ends_when_the_last_of_them_is_reported(tmp_path: Path) -> None:
    stage = late_stage([profile_of(tmp_path, 2), *steps(3), Shutdown()], *[NEVER] * 3)
    log = [entry for entry in stage.serve() if not entry.startswith("result")]
    assert log == [
        "ProfileReply", "draw 0", "draw 1", "report 0", "report 1", "ProfileReply",
        "draw 2", "report 2",
    ]  # fmt: skip


@pytest.mark.parametrize("messages", [[], [NOTHING]], ids=["while it waits", "while it looks"])
def test_a_failure_of_a_pending_step_is_told(
    messages: list[ToWorker | None], capsys: pytest.CaptureFixture[str]
) -> None:
    error = RuntimeError("the GPU is gone")
    stage = Stage(
        [*steps(1), *messages, *[NOTHING] * 3, Shutdown()], lambda log: LateTail(log, [2], error)
    )
    stage.rows.append((0, torch.ones(1, 64)))
    code = exit_code_of(stage.serve, stage.channel, 3)  # type: ignore[arg-type]
    assert code == 1
    assert stage.channel.sent == [WorkerFailed(3, "RuntimeError: the GPU is gone", False)]
    assert "the GPU is gone" in capsys.readouterr().err


def test_a_step_that_fails_while_another_is_pending_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, _, third = steps(3)
    stage = late_stage([first, third, Shutdown()], NEVER)
    assert exit_code_of(stage.serve, stage.channel, 0) == 1  # type: ignore[arg-type]
    failure = stage.channel.sent[-1]
    assert isinstance(failure, WorkerFailed)
    assert failure.message.startswith("ProtocolError: order 2 of stream 0 arrived")
    assert "order 2" in capsys.readouterr().err


def test_a_message_that_a_ready_stage_cannot_take_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="a ready stage received PoolSize"):
        late_stage([PoolSize(1)]).serve()
    # An order counts only within the sealed stream.
    loose: Any = step_plan(0)
    with pytest.raises(ProtocolError, match="a ready stage received StepOrder"):
        late_stage([loose]).serve()


def test_every_order_of_the_sealed_stream_has_a_handler() -> None:
    stage = late_stage([])
    ready = ReadyStage(
        0,
        stage.channel,  # type: ignore[arg-type]
        WorkerInbox(stage.channel),  # type: ignore[arg-type]
        stage.runner,
        stage.mover,
        stage.transfers,
        StageProfile(0, has_gpu=False),
        lambda order: None,
    )
    assert set(ready._on_order) == set(get_args(StageOrder))
    assert set(ready._on_message) | {MeasureCosts, StageAssignment, PoolSize, SealedOrder} == (
        set(get_args(ToWorker)) - {Shutdown}
    )


def test_moments_of_overlapping_steps_are_in_order_and_leave_no_gap() -> None:
    stage = late_stage([*steps(4), *[NOTHING] * 9, Shutdown()], 6, NEVER, 9, 3)
    stage.serve()
    timings = [report.timing for report in stage.channel.sent]
    for timing in timings:
        moments = [getattr(timing, name) for name in timing.__struct_fields__]
        assert moments == sorted(moments)
    for before, after in pairwise(timings):
        assert after.free_s == before.sent_s == before.done_s
    # Launched while step 0 was pending: it waited for nothing.
    assert timings[1].activations_s == timings[1].plan_s == timings[1].free_s
    assert timings[0].plan_s > timings[0].free_s


def links_opened(
    stage: Stage, rows: deque, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[tuple[str, ...], int]]:
    """The addresses and the stage of each link that a regroup will open, all with `rows`."""
    opened = []

    def open_link(
        shape: object, links: tuple[str, ...], number: int, run_directory: str
    ) -> QueueLink:
        opened.append((links, number))
        return QueueLink(rows, deque())

    monkeypatch.setattr("sgl_pipeline.pp_runner.stage_worker.open_activation_link", open_link)
    stage.worker._rows = ActivationShape(64, torch.float32, torch.device("cpu"))
    return opened


@pytest.mark.parametrize("is_told", [False, True], ids=["it hears nothing", "its neighbor is gone"])
def test_a_step_whose_rows_never_come_is_dropped_when_the_stages_regroup(
    is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = OrderStream()
    old = [stream.seal(step_plan(step_id)) for step_id in range(3)]
    plan = StagePlan(0, (3, 3))
    regroup = Regroup(4, plan, ("unix:new",))
    new = [stream.start_over(MirrorSnapshot((), ()), 4), stream.seal(step_plan(7))]
    stage = late_stage([*old, NOTHING, regroup, *new, Shutdown()], 0)
    tail: Any = stage.runner._tail
    tail._looks = [0] * 9  # whatever steps come
    if is_told:
        monkeypatch.setattr(stage.runner, "can_launch", lambda: True)
        receive = stage.runner._link.receive

        def receive_or_tell(step_id: int, num_rows: int) -> torch.Tensor:
            if not stage.rows:
                raise NeighborGone
            return receive(step_id, num_rows)

        monkeypatch.setattr(stage.runner._link, "receive", receive_or_tell)
    rows = deque([(7, torch.ones(1, 64))])
    opened = links_opened(stage, rows, monkeypatch)
    stage.serve()
    reports = [one for one in stage.channel.sent if isinstance(one, StageReport)]
    assert [report.step_id for report in reports] == [0, 7]
    assert [one for one in stage.channel.sent if isinstance(one, Regrouped)] == [Regrouped(1, 4)]
    assert opened == [(("unix:new",), 1)] and not rows


@pytest.mark.parametrize("method", ["switch", "obey"])
def test_a_switch_or_handover_that_waits_for_a_target_is_dropped_when_the_stages_regroup(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = StagePlan(0, (3, 3))
    waiting = {
        "switch": OrderStream().seal(SwitchPlan(0, StagePlan(1, (2, 4)))),
        "obey": FinishHandover(0),
    }
    stage = late_stage([waiting[method], Regroup(4, plan, ("unix:new",)), Shutdown()])
    links_opened(stage, deque(), monkeypatch)
    monkeypatch.setattr(stage.mover, method, lambda order: None)
    monkeypatch.setattr(stage.mover, "send_rest", lambda: False)
    stage.serve()
    assert stage.channel.sent == [Regrouped(1, 4)]
