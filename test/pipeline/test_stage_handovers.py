"""A worker that was asked to leave serves until another one has its stage, pages and all."""

import pytest
from support.pipelines import make_request
from support.recovering_server import PLAN, Server, links
from support.worker_messages import hello, loaded, ready

from sgl_pipeline.args import MigrationArgs
from sgl_pipeline.errors import MoveRefused, StageFailure
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.worker_roster import Addressed
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.scheduling import RecoveryLog
from sgl_pipeline.wire.move_orders import MoveDone, MoveReady
from sgl_pipeline.wire.stage_messages import (
    FinishHandover,
    HandPagesOver,
    PagesCopied,
    PagesTaken,
    PoolSize,
    Regroup,
    Regrouped,
    Shutdown,
    StageAssignment,
    StageReport,
    TakePagesOver,
    WorkerLeaves,
)

ADDRESS = "unix:run/handover-0"


def kinds(told: list[Addressed]) -> list[tuple[int, type]]:
    return [(worker, type(message)) for worker, message in told]


def get_successor_ready(server: Server, worker: int, stage: int) -> StageAssignment:
    """A new worker comes for the stage of a leaver, and loads it; returns what it was told."""
    server.ask(worker, 0.0)
    assert server.recovery.take(hello(worker), 0.0) == []
    ((number, assignment),) = server.recovery.reform(0.0)
    assert number == worker and isinstance(assignment, StageAssignment)
    assert server.recovery.take(loaded(stage), 0.0, worker) == [(worker, PoolSize(10))]
    log_pages = server.roster.log_pages or 0
    assert server.recovery.take(ready(stage, log_pages=log_pages), 0.0, worker) == []
    return assignment


def start_step(server: Server) -> OpenStep:
    """The first step of a request, on its way."""
    server.core.scheduler.add(make_request("a", [1] * 9, 3))
    step = server.core.next_step(0.0)
    assert step is not None
    return step


def finish_step(server: Server, step_id: int = 0, *stages: int) -> None:
    for stage in stages or range(3):
        report = StageReport(
            stage=stage,
            step_id=step_id,
            epoch=server.core.plan.epoch,
            timing=StageTiming(*[0.0] * 7),
            token_ids=(7,) if stage == 2 else None,
        )
        server.core.take_report(report, 0.0)


def take_over(server: Server, worker: int, stage: int, now_s: float = 5.0) -> list[Addressed]:
    """All pages reach the successor at once; returns what follows."""
    server.recovery.reform(now_s)
    number = server.recovery._handovers._num_handovers - 1
    server.recovery.take(PagesCopied(stage, number), now_s)
    assert kinds(server.recovery.reform(now_s))[0][1] is FinishHandover
    server.recovery.take(PagesTaken(stage, number), now_s, worker)
    return server.recovery.reform(now_s)


def test_another_worker_takes_the_stage_over_and_no_token_is_computed_again() -> None:
    log = RecoveryLog(3, 4, 10)
    server = Server(max_restarts=0, log=log)
    recovery, core, roster = server.recovery, server.core, server.roster
    step = start_step(server)
    assert recovery.take(WorkerLeaves(1), 1.0) == [] and recovery.leavers == (1,)
    assignment = get_successor_ready(server, 3, 1)
    assert (assignment.stage, assignment.plan) == (1, PLAN)
    # Nobody else ever joins the stream of its first links.
    assert assignment.links == links(1)
    assert roster.workers_of_stages == [0, 1, 2] and recovery.current is None
    told = recovery.reform(2.0)
    assert told[0] == (3, TakePagesOver(0, ADDRESS))
    worker, order = told[1]
    assert worker == 1 and isinstance(order, HandPagesOver)
    assert (order.handover, order.address, len(order.pages)) == (0, ADDRESS, 3 * 4)
    # A step is on its way: no other one follows it, and the rest of the pages follows that.
    recovery.take(PagesCopied(1, 0), 3.0, 1)
    core.scheduler.add(make_request("b", [2] * 9, 3))
    assert recovery.reform(3.0) == [] and core.next_step(3.0) is None
    finish_step(server, step.microbatch.step_id)
    assert recovery.reform(3.5) == [(1, FinishHandover(0))] and recovery.reform(3.6) == []
    recovery.take(PagesTaken(1, 0), 4.0, 3)
    told = recovery.reform(4.0)
    assert kinds(told) == [(1, Shutdown), (0, Regroup), (2, Regroup), (3, Regroup)]
    assert {message.incarnation for _, message in told[1:] if isinstance(message, Regroup)} == {2}
    assert roster.workers_of_stages == [0, 3, 2] and recovery.leavers == ()
    server.regrouped(0, 1, incarnation=2)
    assert recovery.start_order(4.5) is None
    server.regrouped(2, incarnation=2)
    assert recovery.start_order(4.5) is not None
    (record,) = recovery.history
    assert record.is_planned and record.stages == (1,)
    assert (record.began_s, record.stream_s) == (3.0, 4.5)
    assert (record.num_requests, record.num_tokens, record.num_replay_tokens) == (1, 0, 0)
    again = core.next_step(5.0)
    # What was computed is there: the first request goes on with its next token.
    assert again is not None and again.microbatch.num_decodes == 1
    assert not again.microbatch.replays and not log.owes


def test_a_later_loss_of_the_next_stage_finds_no_rows_of_the_one_that_left() -> None:
    log = RecoveryLog(3, 4, 10)
    server = Server(log=log)
    start_step(server)
    finish_step(server)
    server.recovery.take(WorkerLeaves(1), 1.0)
    get_successor_ready(server, 3, 1)
    take_over(server, 3, 1)
    server.regrouped(0, 1, 2, incarnation=2)
    assert server.recovery.start_order(5.0) is not None
    server.lose(2, 6.0)
    current = server.recovery.current
    assert current is not None and (current.num_tokens, current.num_replay_tokens) == (9, 0)


def test_a_leaver_that_is_killed_is_lost_and_its_successor_fills_the_stage() -> None:
    server = Server()
    server.recovery.take(WorkerLeaves(1), 1.0)
    server.ask(3, 1.0)
    server.recovery.take(hello(3), 1.0)
    server.recovery.reform(1.0)  # worker 3 loads
    told = server.lose(1, 2.0)
    assert kinds(told) == [(0, Regroup), (2, Regroup)]
    assert server.roster.workers_of_stages == [0, 3, 2] and server.recovery.leavers == ()
    assert server.recovery.num_wanted_workers(2.0) == 0
    server.regrouped(0, 2, incarnation=2)
    server.recovery.take(loaded(1), 3.0, 3)
    assert kinds(server.recovery.take(ready(1), 3.0, 3)) == [(3, Regroup)]
    server.regrouped(1, incarnation=2)
    assert server.recovery.start_order(3.0) is not None
    assert not server.recovery.history[-1].is_planned


def test_a_successor_that_dies_in_the_pause_costs_the_pause_alone() -> None:
    server = Server(max_restarts=0)
    recovery = server.recovery
    recovery.take(WorkerLeaves(1), 1.0)
    get_successor_ready(server, 3, 1)
    recovery.reform(2.0)
    recovery.take(PagesCopied(1, 0), 2.0, 1)
    assert recovery.reform(2.0) == [(1, FinishHandover(0))]
    server.core.scheduler.add(make_request("a", [1] * 9, 3))
    assert server.core.next_step(2.0) is None
    assert server.lose(3, 3.0) == [] and recovery.current is None
    assert server.core.next_step(3.0) is not None and recovery.leavers == (1,)
    # Its last word means nothing any more, and another worker is asked for.
    recovery.take(PagesTaken(1, 0), 3.0, 3)
    get_successor_ready(server, 4, 1)
    told = recovery.reform(4.0)
    assert told[0] == (4, TakePagesOver(1, "unix:run/handover-1"))


def test_a_loss_elsewhere_comes_first_and_the_pages_are_copied_again() -> None:
    server = Server()
    recovery = server.recovery
    recovery.take(WorkerLeaves(1), 1.0)
    get_successor_ready(server, 3, 1)
    recovery.reform(2.0)
    recovery.take(PagesCopied(1, 0), 2.0, 1)
    recovery.reform(2.0)
    told = server.lose(2, 3.0)
    assert kinds(told) == [(0, Regroup), (1, Regroup)]  # not the successor
    recovery.take(PagesTaken(1, 0), 3.0, 3)
    assert recovery.reform(3.0) == []
    server.ask(4, 3.0)
    ((_, assignment),) = recovery.take(hello(4), 3.0)
    assert isinstance(assignment, StageAssignment) and assignment.stage == 2
    server.regrouped(0, 1, incarnation=2)
    recovery.take(loaded(2), 4.0, 4)
    recovery.take(ready(2), 4.0, 4)
    assert recovery.start_order(4.0) is not None
    assert recovery.reform(4.5) == []  # not before it is over
    assert recovery.settle(5.0) is not None
    assert kinds(recovery.reform(5.0)) == [(3, TakePagesOver), (1, HandPagesOver)]


def test_two_leavers_go_one_after_the_other() -> None:
    server = Server()
    recovery = server.recovery
    recovery.take(WorkerLeaves(0), 1.0)
    recovery.take(WorkerLeaves(2), 1.0)
    assert recovery.num_wanted_workers(1.0) == 2
    for worker in (3, 4):
        server.ask(worker, 1.0)
        recovery.take(hello(worker), 1.0)
    told = recovery.reform(1.0)
    assert kinds(told) == [(3, StageAssignment), (4, StageAssignment)]
    for worker, stage in ((3, 0), (4, 2)):
        recovery.take(loaded(stage), 2.0, worker)
        recovery.take(ready(stage), 2.0, worker)
    assert kinds(take_over(server, 3, 0))[0] == (0, Shutdown)
    assert recovery.reform(5.0) == []
    server.regrouped(0, 1, 2, incarnation=3)
    assert recovery.start_order(5.0) is not None and recovery.settle(5.0) is not None
    assert kinds(take_over(server, 4, 2))[0] == (2, Shutdown)
    server.regrouped(0, 1, 2, incarnation=4)
    assert recovery.start_order(5.0) is not None
    assert server.roster.workers_of_stages == [3, 1, 4]


def test_where_no_worker_comes_the_leaver_is_lost_when_its_time_is_over() -> None:
    server = Server(join_limit_s=10.0)
    recovery = server.recovery
    recovery.take(WorkerLeaves(1), 1.0)
    server.ask(3, 1.0)
    recovery.refused(3, "there is none", 1.0)
    assert recovery.num_wanted_workers(2.0) == 0
    assert [*recovery.late_workers(11.0)] == []
    ((worker, reason),) = recovery.late_workers(11.1)
    assert worker == 1
    assert reason.endswith("took its stage over within 10 s (--stage-join-limit-s): there is none")
    server.recovery.lose(worker, reason, 11.1)
    assert server.roster.vacant_stages == [1] and recovery.leavers == ()


def test_without_recovery_a_leaver_ends_the_server_at_once() -> None:
    server = Server(mode="off")
    server.recovery.take(WorkerLeaves(1), 1.0)
    assert server.recovery.num_wanted_workers(1.0) == 0
    ((worker, reason),) = server.recovery.late_workers(1.0)
    with pytest.raises(StageFailure, match="leave"):
        server.recovery.lose(worker, reason, 1.0)


def test_a_worker_without_a_stage_goes_at_once() -> None:
    server = Server(spare_workers=1)
    recovery = server.recovery
    server.ask(3, 0.0)
    recovery.take(hello(3), 0.0)
    assert recovery.take(WorkerLeaves(3), 1.0) == [(3, Shutdown())]
    server.ask(4, 1.0)  # has not greeted
    assert recovery.take(WorkerLeaves(4), 1.0) == [(4, Shutdown())]
    assert recovery.num_wanted_workers(1.0) == 1 and recovery.leavers == ()
    # A successor neither.
    recovery.take(WorkerLeaves(1), 1.0)
    server.ask(5, 1.0)
    server.ask(6, 1.0)
    recovery.take(hello(5), 1.0)
    recovery.reform(1.0)
    assert recovery.take(WorkerLeaves(5), 1.0) == [(5, Shutdown())]
    assert recovery.num_wanted_workers(1.0) == 1 and recovery.leavers == (1,)


def test_layers_that_move_arrive_first_and_no_others_set_out() -> None:
    server = Server(migration=MigrationArgs(mode="manual", spare_layers=1), spare_workers=1)
    server.ask(3, 0.0)
    server.recovery.take(hello(3), 0.0)
    migration = server.core.migration
    migration.move_to((2, 4, 2), 1.0)
    server.recovery.take(WorkerLeaves(1), 1.0)
    assert server.recovery.reform(1.0) == []
    server.core.orders_before_step(1.0)
    for stage in range(3):
        migration.take(MoveReady(stage=stage, move=0, load_ms=0.0), 2.0)
    server.core.orders_before_step(2.0)
    for stage in range(3):
        done = MoveDone(
            stage=stage, move=0, copied_bytes=0, patched_bytes=0, patch_ms=0.0, wait_ms=0.0
        )
        migration.take(done, 2.0)
    ((_, assignment),) = server.recovery.reform(2.0)
    assert isinstance(assignment, StageAssignment)
    assert assignment.plan.layer_counts == (2, 4, 2)
    for move in (lambda: migration.move_to((3, 3, 2), 3.0), lambda: migration.undo(3.0)):
        with pytest.raises(MoveRefused, match="handed over"):
            move()
    server.recovery.take(loaded(1), 3.0, 3)
    server.recovery.take(ready(1), 3.0, 3)
    take_over(server, 3, 1)
    migration.move_to((3, 3, 2), 6.0)


def test_fewer_stages_have_no_use_for_a_successor_of_another_plan() -> None:
    server = Server(retry_s=5.0)
    recovery = server.recovery
    recovery.take(WorkerLeaves(1), 0.0)
    get_successor_ready(server, 3, 1)
    server.lose(2, 1.0)
    server.ask(4, 1.0)
    recovery.refused(4, "there is none", 1.0)
    server.regrouped(0, 1, incarnation=2)
    told = recovery.reform(1.0)
    assert kinds(told) == [(3, Shutdown), (0, StageAssignment), (1, StageAssignment)]
    assert recovery.leavers == (1,)
    for stage in range(2):
        recovery.take(loaded(stage), 2.0)
    for stage in range(2):
        recovery.take(ready(stage), 2.0)
    assert recovery.start_order(2.0) is not None and recovery.settle(2.0) is not None
    # The leaver is of the new pipeline, and comes first when there is a worker again.
    server.ask(5, 7.0)
    recovery.take(hello(5), 7.0)
    ((worker, assignment),) = recovery.reform(7.0)
    assert isinstance(assignment, StageAssignment)
    assert (worker, assignment.stage, assignment.plan.num_stages) == (5, 1, 2)


def test_what_only_the_speaker_tells_apart_is_booked_for_the_speaker() -> None:
    server = Server()
    server.recovery.take(WorkerLeaves(1), 0.0)
    get_successor_ready(server, 3, 1)
    take_over(server, 3, 1)
    told = server.recovery.take(Regrouped(1, 2), 5.0, 3)
    assert told == [] and server.roster.is_ready(3) and not server.roster.is_ready(1)
