"""What the desk carries: losses to the recovery, its answers to workers, a word to the log."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.assignments import tiny_assignment

from sgl_pipeline.managers.stages.recovery_actions import DUMP_GRACE_S, RecoveryActions
from sgl_pipeline.pipeline.stage_watch import Silence
from sgl_pipeline.pipeline.worker_source import RefusedWorker
from sgl_pipeline.records.recovery_record import LostWorker, RecoveryRecord
from sgl_pipeline.wire.stage_messages import Shutdown, WorkerLeaves


class Recovery:
    """Wants two workers, and can begin anew when `order` is set."""

    def __init__(self) -> None:
        self.current: RecoveryRecord | None = None
        self.history: list[RecoveryRecord] = []
        self.num_wanted = 2
        self.order: Any = None
        self.late: list[tuple[int, str]] = []
        self.lost: list[tuple[int, str]] = []
        self.limits: list[float | None] = []
        self.refusals: list[tuple[int, str]] = []
        self.reformed: list[Any] = []
        self.heard: list[Any] = []
        self.num_silent = 0
        self.has_run = False

    def num_wanted_workers(self, now_s: float) -> int:
        return self.num_wanted

    def asked(self, worker: int, now_s: float) -> None:
        self.num_wanted -= 1

    def refused(self, worker: int, reason: str, now_s: float) -> None:
        self.refusals.append((worker, reason))

    def reform(self, now_s: float) -> list[Any]:
        told, self.reformed = self.reformed, []
        return told

    def take(self, message: Any, now_s: float, speaker: int | None) -> list[Any]:
        self.heard.append(message)
        return []

    def lose(self, worker: int, reason: str, now_s: float, *, was_silent: bool) -> list[Any]:
        self.lost.append((worker, reason))
        self.num_silent += was_silent
        lost = (LostWorker(worker, worker, reason),)
        self.current = RecoveryRecord(began_s=now_s, incarnation=1, lost=lost, num_requests=3)
        return [(0, "regroup")]

    def late_workers(self, now_s: float, step_limit_s: float | None) -> list[tuple[int, str]]:
        self.limits.append(step_limit_s)
        return self.late

    def start_order(self, now_s: float) -> Any:
        order, self.order = self.order, None
        if order is not None and self.current is not None:
            self.history.append(self.current)
            self.current = None
        return order

    @property
    def unsettled(self) -> RecoveryRecord | None:
        return self.current

    def settle(self, now_s: float) -> RecoveryRecord | None:
        if not (self.has_run and self.history):
            return None
        self.history[-1].ended_s = now_s
        return self.history.pop()


class Launcher:
    """Worker s fills stage s; `ended` are those that have ended."""

    def __init__(self) -> None:
        self.stages = range(2)
        self.refused: list[RefusedWorker] = []
        self.ended: list[tuple[int, str]] = []
        self.given_up: list[int] = []
        self.dumped: list[int] = []
        self.sent: list[Any] = []
        self.broadcasts: list[Any] = []
        self.num_asked = 0
        self.silent: list[tuple[int, str]] = []
        self.leavers: list[int] = []
        self.roster = SimpleNamespace(
            worker_of=lambda stage: stage,
            worker_stage=lambda worker: worker if worker < 2 else None,
            workers_of_stages=[0, 1],
        )

    def tell(self, messages: list[Any]) -> None:
        self.sent += [message for _, message in messages]

    def silent_newcomers(self, now_s: float) -> list[tuple[int, str]]:
        return self.silent

    def take_lost(self) -> list[tuple[int, str]]:
        ended, self.ended = self.ended, []
        return ended

    def take_leavers(self) -> list[int]:
        leavers, self.leavers = self.leavers, []
        return leavers

    def take_refused(self) -> list[RefusedWorker]:
        refused, self.refused = self.refused, []
        return refused

    def ask_for_worker(self) -> int:
        self.num_asked += 1
        return 1 + self.num_asked

    def ask_for_dump(self, worker: int) -> str:
        self.dumped.append(worker)
        return "T (stopped)"

    def give_up(self, worker: int) -> None:
        self.given_up.append(worker)

    def broadcast(self, order: Any) -> None:
        self.broadcasts.append(order)


class Watch:
    def __init__(self) -> None:
        self.silences: list[Silence] = []

    def silent_stages(self, now_s: float) -> list[Silence]:
        return self.silences

    def bound_s(self, stage: int) -> float:
        return 4.0 + stage


@pytest.fixture
def parts(caplog: pytest.LogCaptureFixture) -> SimpleNamespace:
    caplog.set_level("INFO")
    recovery, launcher, watch = Recovery(), Launcher(), Watch()
    desk = RecoveryActions(recovery, launcher, watch)  # type: ignore[arg-type]
    return SimpleNamespace(recovery=recovery, launcher=launcher, watch=watch, desk=desk)


def silence(step_id: int) -> Silence:
    microbatch: Any = SimpleNamespace(step_id=step_id, num_prefill_tokens=5, num_decodes=2)
    return Silence(1, microbatch, 10.0, 5.0)


def test_a_loss_is_told_to_those_that_are_left_and_the_end_to_all(
    parts: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[int] = []
    parts.desk.on_lost = lost.append
    parts.desk.serve(0.0)
    assert parts.launcher.num_asked == 2
    parts.launcher.ended = [(1, "killed")]
    parts.desk.check(1.0)
    assert parts.recovery.lost == [(1, "killed")] and lost == [1]
    assert parts.launcher.sent == ["regroup"]
    assert "stage 1 (worker 1) is lost: killed; it is replaced, and 3 running" in caplog.text
    parts.desk.serve(2.0)
    assert parts.launcher.broadcasts == []
    parts.recovery.order = "begin"
    parts.desk.serve(3.5)
    assert parts.launcher.broadcasts == ["begin"]
    parts.desk.settle(3.4)
    assert "recovered" not in caplog.text
    parts.recovery.has_run = True
    parts.desk.settle(3.5)
    assert "recovered in 2.50 s: stage 1 runs again (worker 1)" in caplog.text


def test_a_leaver_its_successor_and_the_end_have_a_line_each(
    parts: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[int] = []
    parts.desk.on_lost = lost.append
    parts.launcher.leavers = [1, 5]  # with their host
    parts.desk.check(1.0)
    assert parts.recovery.heard == [WorkerLeaves(1), WorkerLeaves(5)]
    assert "stage 1 (worker 1) was asked to leave: it serves on until" in caplog.text
    assert "worker 5" not in caplog.text
    assignment = tiny_assignment(1, 3, 3)
    parts.recovery.reformed = [(2, assignment)]
    parts.desk.serve(2.0)
    assert parts.launcher.sent == [assignment] and lost == []
    assert "worker 2 loads the layers of stage 1, worker 1 serves on" in caplog.text
    left = (LostWorker(4, 1, "it was asked to leave", has_left=True),)
    record = RecoveryRecord(began_s=3.0, incarnation=1, lost=left, num_stages=2, stages_before=2)

    def hand_over(now_s: float) -> list[Any]:
        parts.recovery.current = record
        return [(4, Shutdown())]

    parts.recovery.reform = hand_over
    parts.desk.serve(3.0)
    # Whoever waits for the leaver's word need not any more.
    assert parts.launcher.sent[-1] == Shutdown() and lost == [1]
    parts.recovery.history, parts.recovery.has_run = [record], True
    parts.desk.settle(3.25)
    line = "stage 1: worker 1 took over from worker 4 with a pause of 0.25 s (0 tokens computed"
    assert line in caplog.text


def test_a_silent_stage_is_asked_once_and_then_replaced(
    parts: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    parts.watch.silences = [silence(7)]
    parts.desk.check(15.5)
    parts.desk.check(15.6)
    assert parts.launcher.dumped == [1] and parts.launcher.given_up == []
    assert "stage 1 (worker 1) hangs: it has been silent for 5.5 s in step 7" in caplog.text
    assert "T (stopped)" in caplog.text
    parts.desk.check(15.6 + DUMP_GRACE_S)
    assert parts.launcher.given_up == [1]
    ((worker, reason),) = parts.recovery.lost
    assert worker == 1 and "in step 7 (5 prefill tokens, 2 decodes)" in reason
    assert parts.recovery.num_silent == 1


def test_a_stage_that_goes_on_after_it_was_asked_is_kept(parts: SimpleNamespace) -> None:
    parts.watch.silences = [silence(7)]
    parts.desk.check(15.5)
    parts.watch.silences = []
    parts.desk.check(16.0)
    parts.watch.silences = [silence(8)]
    parts.desk.check(30.0)
    assert parts.launcher.dumped == [1, 1] and parts.launcher.given_up == []


def test_who_is_late_is_given_up(parts: SimpleNamespace) -> None:
    parts.desk.check(0.0)
    assert parts.recovery.limits == [None]
    parts.launcher.ended = [(0, "killed")]
    parts.recovery.late = [(1, "late")]
    parts.desk.check(1.0)
    # The slowest stage's limit.
    assert parts.recovery.limits[-1] == 5.0
    assert parts.launcher.given_up == [1]
    assert parts.recovery.lost == [(0, "killed"), (1, "late")]


def test_a_refusal_and_what_follows_are_told_to_all_whom_it_concerns(
    parts: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    parts.launcher.ended = [(1, "killed")]
    parts.launcher.refused = [RefusedWorker(2, "no card is left")]
    parts.desk.check(1.0)
    assert parts.recovery.refusals == [(2, "no card is left")]
    assert "worker 2 is not available: no card is left" in caplog.text

    def reform(now_s: float) -> list[Any]:
        parts.launcher.stages = range(1)
        return [(0, "another stage")]

    lost: list[int] = []
    parts.desk.on_lost = lost.append
    parts.recovery.reform = reform
    parts.desk.serve(2.0)
    assert parts.launcher.sent == ["regroup", "another stage"]
    # Whatever was asked of a stage, no worker has that number any more.
    assert lost == [0, 1]
    assert "for stage 1: the layers go to the 1 of 2 stages that are left" in caplog.text


def test_health_is_answered_for_as_long_as_a_recovery_may_take(parts: SimpleNamespace) -> None:
    parts.recovery.bound_s = 5.0
    assert not parts.desk.is_within_bound(0.0)
    parts.launcher.ended = [(1, "killed")]
    parts.desk.check(1.0)
    assert parts.desk.is_within_bound(6.0) and not parts.desk.is_within_bound(6.1)


def test_a_newcomer_that_is_silent_is_given_up(parts: SimpleNamespace) -> None:
    parts.launcher.silent = [(5, "it was silent")]
    parts.desk.check(1.0)
    assert parts.launcher.given_up == [5]
    assert parts.recovery.lost == [(5, "it was silent")]


def test_a_spare_that_is_lost_is_one_line(
    parts: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    parts.launcher.ended = [(5, "killed")]
    parts.desk.check(1.0)
    assert "worker 5, which fills no stage, is lost: killed" in caplog.text
