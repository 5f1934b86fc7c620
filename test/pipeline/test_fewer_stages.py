"""A stage that no worker comes for: the others share its layers, until one comes."""

import pytest
from support.pipelines import make_request
from support.recovering_server import PLAN, Server
from support.worker_messages import hello, loaded, ready

from sgl_pipeline.args import MigrationArgs
from sgl_pipeline.errors import (
    MoveRefused,
    PipelineLost,
    RequestError,
)
from sgl_pipeline.pipeline.worker_roster import Addressed
from sgl_pipeline.records.move_record import MoveOutcome, MoveRecord
from sgl_pipeline.scheduling import RecoveryLog
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import PoolSize, Regroup, StageAssignment


def shrink(server: Server, worker: int = 1, now_s: float = 0.0) -> list[Addressed]:
    """A worker of three is lost, and the source has no other; what the two that are left are
    told."""
    server.lose(worker, now_s)
    server.ask(9, now_s)
    server.recovery.refused(9, "there is none", now_s)
    assert server.recovery.reform(now_s) == []  # they have not let go of the old stream
    server.regrouped(*(stage for stage in range(3) if stage != worker), incarnation=1)
    return server.recovery.reform(now_s)


def rejoin(server: Server, *stages: int, num_pages: int = 10) -> None:
    """The workers of these stages load and get ready."""
    for stage in stages:
        server.recovery.take(loaded(stage, num_pages), 0.0)
    for stage in stages:
        server.recovery.take(ready(stage), 0.0)


def test_without_a_worker_the_others_share_its_layers() -> None:
    server = Server()
    core, recovery = server.core, server.recovery
    core.scheduler.add(make_request("small", [1] * 9, 3))
    core.scheduler.add(make_request("large", [1] * 30, 9))
    core.next_step(0.0)
    told = shrink(server)
    plan = StagePlan(1, (4, 4))
    assert [(worker, one.stage, one.plan) for worker, one in told] == [(0, 0, plan), (2, 1, plan)]
    assert all(one.links == ("unix:run/link-2-0",) for _, one in told)
    assert all(one.fewer_pages_do for _, one in told)
    assert core.next_step(0.0) is None
    # More layers leave less room; all have as many pages as the one with the fewest.
    assert recovery.take(loaded(0, 7), 1.0) == []
    assert recovery.take(loaded(1, 6), 1.0) == [(0, PoolSize(6)), (2, PoolSize(6))]
    recovery.take(ready(0), 1.0)
    assert recovery.start_order(1.0) is None
    recovery.take(ready(1), 1.0)
    order = recovery.start_order(2.0)
    assert order is not None and order.incarnation == 2
    # 38 tokens do not fit six pages of four; the others go on.
    (unfit,) = core.take_unfit()
    assert unfit.request_id == "large" and unfit.finish is not None
    assert unfit.finish.status_code == 503
    with pytest.raises(RequestError, match=r"24 tokens.*fewer stages") as caught:
        core.scheduler.add(make_request("larger", [1] * 30, 9))
    assert caught.value.status_code == 503
    step = core.next_step(2.0)
    assert step is not None and step.microbatch.epoch == 1
    load = core.scheduler.load()
    assert (load.pipeline_depth, load.total_pages) == (2, 6)
    (record,) = recovery.history
    assert (record.num_stages, record.stages_before) == (2, 3)
    assert record.what_happened == "stage 1 lost, 2 stages in place of 3"
    state = core.state(2.0)
    assert (state.plan.num_stages, state.missing_stages) == (2, 1)


def test_those_that_are_left_share_the_layers_by_time_where_the_first_split_was_made_so() -> None:
    told = shrink(Server(layer_partition="auto"))
    # The last has the head, which takes as long as two layers.
    assert [one.plan for _, one in told] == [StagePlan(1, (5, 3))] * 2


def test_what_a_lost_stage_could_compute_again_is_prefilled_where_stages_change() -> None:
    server = Server(log=RecoveryLog(3, 4, 0))
    core, recovery = server.core, server.recovery
    core.scheduler.add(make_request("a", [1] * 9, 3))
    step = core.next_step(0.0)
    assert step is not None
    core.scheduler.on_result(step.microbatch.step_id, [5], 0.0)
    told = shrink(server, 0, 1.0)
    record = recovery.current
    assert [one.plan.num_stages for _, one in told] == [2, 2] and record is not None
    assert (record.num_tokens, record.num_replay_tokens) == (9, 0)
    rejoin(server, 0, 1)
    assert recovery.start_order(2.0) is not None
    step = core.next_step(2.0)
    assert step is not None and step.microbatch.replays == ()
    assert core.state(2.0).replayed_tokens == (0, 0, 0)


def test_it_asks_again_after_a_while_and_grows_when_a_worker_comes() -> None:
    server = Server(retry_s=30.0)
    core, recovery = server.core, server.recovery
    shrink(server)
    rejoin(server, 0, 1, num_pages=6)
    assert recovery.start_order(0.0) is not None and recovery.settle(0.0) is not None
    assert recovery.num_wanted_workers(29.0) == 0 and recovery.num_wanted_workers(30.0) == 1
    server.ask(10, 30.0)
    assert recovery.reform(30.0) == []
    recovery.take(hello(10), 31.0)
    # Those that serve let go first, and only then change their numbers.
    assert [type(message) for _, message in recovery.reform(31.0)] == [Regroup, Regroup]
    assert core.next_step(31.0) is None and recovery.reform(31.0) == []
    server.regrouped(0, 1, incarnation=3)
    told = recovery.reform(32.0)
    assert [(worker, one.stage) for worker, one in told] == [(0, 0), (2, 1), (10, 2)]
    assert told[0][1].plan == StagePlan(2, PLAN.layer_counts)
    rejoin(server, 0, 1, 2)
    order = recovery.start_order(33.0)
    assert order is not None and order.incarnation == 4
    assert core.scheduler.load().total_pages == 10 and core.scheduler.load().pipeline_depth == 3
    assert recovery.history[-1].what_happened == "a worker came, 3 stages in place of 2"
    assert core.state(33.0).missing_stages == 0 and recovery.reform(34.0) == []


def test_two_workers_in_a_row_that_do_not_get_ready_are_enough() -> None:
    server = Server(max_restarts=1)
    recovery = server.recovery
    server.lose(1, 0.0)
    server.ask(3, 0.0)
    server.lose(3, 1.0)  # it has not even greeted
    assert recovery.num_wanted_workers(1.0) == 1
    server.ask(4, 1.0)
    recovery.take(hello(4), 2.0)
    server.lose(4, 3.0)  # it was loading; neither counts as a restart
    assert recovery.num_wanted_workers(3.0) == 0
    server.regrouped(0, 2, incarnation=2)
    assert [worker for worker, _ in recovery.reform(3.0)] == [0, 2]


def test_a_worker_that_comes_and_ends_again_is_asked_for_less_and_less_often() -> None:
    server = Server(retry_s=10.0)
    recovery = server.recovery
    shrink(server)
    rejoin(server, 0, 1)
    assert recovery.start_order(0.0) is not None and recovery.settle(0.0) is not None
    server.ask(20, 10.0)
    recovery.take(hello(20), 10.0)
    recovery.reform(10.0)
    server.lose(20, 10.0)  # before the others have let go: they go on as they were
    server.regrouped(0, 1, incarnation=3)
    assert recovery.reform(10.0) == [] and recovery.start_order(10.0) is not None
    assert not recovery.history[-1].has_other_stages
    # That the stages which share the layers got ready is no news of the source.
    assert recovery.num_wanted_workers(29.9) == 0 and recovery.num_wanted_workers(30.0) == 1
    server.ask(21, 30.0)
    recovery.refused(21, "there is none", 30.0)
    assert recovery.num_wanted_workers(69.9) == 0 and recovery.num_wanted_workers(70.0) == 1


def test_a_stage_lost_while_the_others_take_over_leaves_one_for_all() -> None:
    server = Server()
    recovery = server.recovery
    shrink(server)
    recovery.take(loaded(0), 1.0)
    # Worker 0 waits for the page count, worker 2 is gone; there may be a worker now.
    assert server.lose(2, 1.0) == [] and recovery.num_wanted_workers(1.0) == 2
    server.ask(11, 1.0)
    recovery.refused(11, "there is none", 1.0)
    ((worker, assignment),) = recovery.reform(1.0)
    assert isinstance(assignment, StageAssignment)
    assert (worker, assignment.stage, assignment.plan) == (0, 0, StagePlan(2, (8,)))
    assert assignment.links == ()
    rejoin(server, 0)
    assert recovery.start_order(2.0) is not None
    assert recovery.history[-1].num_stages == 1


def test_a_spare_takes_the_place_before_anybody_shares_layers() -> None:
    server = Server(spare_workers=1)
    server.ask(3, 0.0)
    server.recovery.take(hello(3), 0.0)
    told = server.lose(1, 1.0)
    server.ask(4, 1.0)
    server.recovery.refused(4, "there is none", 1.0)
    assert [(worker, type(one)) for worker, one in told][-1] == (3, StageAssignment)
    server.regrouped(0, 2, incarnation=1)
    assert server.recovery.reform(1.0) == []


@pytest.mark.parametrize("min_stages", [2, 3])
def test_with_too_few_stages_it_is_lost(min_stages: int) -> None:
    server = Server(min_stages=min_stages)
    server.lose(0, 0.0)
    if min_stages == 2:
        server.lose(1, 0.0)
    server.ask(9, 0.0)
    server.recovery.refused(9, "there is none", 0.0)
    server.regrouped(2, incarnation=4 - min_stages)
    if min_stages == 3:
        server.regrouped(1, incarnation=1)
    with pytest.raises(PipelineLost, match=rf"available .*\(there is none\).*{min_stages}$"):
        server.recovery.reform(0.0)


def test_a_move_that_is_wanted_meanwhile_is_abandoned_and_the_next_is_of_the_new_stages() -> None:
    server = Server(migration=MigrationArgs(mode="manual", spare_layers=4))
    server.lose(1, 0.0)
    server.core.migration.move_to((3, 2, 3), 0.0)
    server.ask(9, 0.0)
    server.recovery.refused(9, "there is none", 0.0)
    server.regrouped(0, 2, incarnation=1)
    told = server.recovery.reform(0.0)
    assert [one.max_layers for _, one in told] == [8, 8]
    (_, move) = server.core.take_events()
    assert isinstance(move, MoveRecord)
    assert move.outcome is MoveOutcome.ABANDONED and "2 stages share" in move.reason
    rejoin(server, 0, 1)
    assert server.recovery.start_order(1.0) is not None
    with pytest.raises(MoveRefused, match="8 in 2"):
        server.core.migration.move_to((3, 2, 3), 1.0)
    assert server.core.migration.move_to((5, 3), 1.0).move == 1
