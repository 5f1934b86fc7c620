"""A lost worker is replaced by whoever comes, stage by stage; what is too much ends the server."""

import pytest
from msgspec import structs
from support.pipelines import make_request
from support.recovering_server import PLAN, Server, links
from support.worker_messages import hello, loaded, ready

from sgl_pipeline.args import (
    DEFAULT_LOG_MIB,
    MigrationArgs,
    PipelineArgs,
    RecoveryArgs,
    StageArgs,
)
from sgl_pipeline.errors import ConfigurationError, ProtocolError, StageFailure
from sgl_pipeline.records.recovery_record import LostWorker
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import PoolSize, Regroup, StageAssignment, StageReport

PAGES = ("unix:run",) * 3  # where stages hand over KV pages


def test_the_others_regroup_and_the_newcomer_gets_the_stage_of_the_lost_one() -> None:
    server = Server()
    recovery = server.recovery
    assert recovery.num_wanted_workers(2.0) == 0
    told = server.lose(1, 10.0)
    assert told == [(0, Regroup(1, PLAN, links(1), PAGES)), (2, Regroup(1, PLAN, links(1), PAGES))]
    assert server.roster.vacant_stages == [1]
    server.ask(3, 10.0)
    assert recovery.num_wanted_workers(2.0) == 0
    assert server.regrouped(0, incarnation=1) == []
    assert recovery.current is not None and recovery.current.survivors_s is None
    server.regrouped(2, incarnation=1, now_s=10.5)
    assert recovery.current.survivors_s == 10.5
    ((worker, assignment),) = recovery.take(hello(3), 11.0)
    assert isinstance(assignment, StageAssignment)
    assert (worker, assignment.stage, assignment.plan) == (3, 1, PLAN)
    assert assignment.links == links(1)
    assert recovery.take(loaded(1), 12.0) == [(3, PoolSize(10))]
    assert recovery.start_order(12.0) is None
    assert recovery.take(ready(1), 13.0) == []
    order = recovery.start_order(13.5)
    assert order is not None and (order.incarnation, order.number) == (1, 0)
    assert recovery.start_order(13.5) is None and recovery.current is None
    (record,) = recovery.history
    assert record.lost == (LostWorker(1, 1, "killed"),) and record.stages == (1,)
    assert (record.began_s, record.survivors_s, record.stream_s) == (10.0, 10.5, 13.5)
    # No step is due: nobody waits for one.
    assert recovery.unsettled is record and record.ended_s is None
    assert recovery.settle(13.6) is record and record.ended_s == 13.6
    assert recovery.unsettled is None and recovery.settle(14.0) is None
    assert server.roster.workers_of_stages == [0, 3, 2]


def test_what_ran_is_counted_and_goes_on_when_all_are_there() -> None:
    server = Server(spare_workers=1)
    recovery, core = server.recovery, server.core
    server.ask(3, 0.0)
    recovery.take(hello(3), 0.0)
    core.scheduler.add(make_request("a", [1] * 9, 3))
    core.next_step(0.0)
    for stage in range(3):
        report = StageReport(
            stage=stage,
            step_id=0,
            epoch=0,
            timing=StageTiming(*[0.0] * 7),
            token_ids=(7,) if stage == 2 else None,
        )
        core.take_report(report, 0.0)
    told = server.lose(2, 1.0)
    # The spare takes the place at once.
    assert [worker for worker, _ in told] == [0, 1, 3]
    assert core.next_step(1.0) is None
    assert recovery.current is not None
    assert (recovery.current.num_requests, recovery.current.num_tokens) == (1, 9)
    # Another spare is to come, which nobody waits for.
    server.ask(4, 1.0)
    server.regrouped(0, 1, incarnation=1)
    recovery.take(loaded(2), 1.0)
    recovery.take(ready(2), 1.0)
    assert recovery.start_order(2.0) is not None
    step = core.next_step(2.0)
    assert step is not None and step.microbatch.num_tokens == 10


def test_a_replacement_that_dies_is_replaced() -> None:
    server = Server()
    server.lose(1, 0.0)
    server.ask(3, 0.0)
    server.regrouped(0, incarnation=1)
    server.recovery.take(hello(3), 0.0)
    told = server.lose(3, 1.0)
    # It may have listened at the links of that stream.
    assert [(worker, type(message)) for worker, message in told] == [(0, Regroup), (2, Regroup)]
    assert told[0][1] == Regroup(2, PLAN, links(2), PAGES)
    server.ask(4, 1.0)
    ((_, assignment),) = server.recovery.take(hello(4), 2.0)
    assert isinstance(assignment, StageAssignment) and assignment.links == links(2)
    server.recovery.take(loaded(1), 2.0)
    server.recovery.take(ready(1), 2.0)
    # What the others say of the first stream does not count.
    server.regrouped(2, incarnation=1)
    server.regrouped(0, incarnation=2)
    assert server.recovery.start_order(2.0) is None
    server.regrouped(2, incarnation=2)
    order = server.recovery.start_order(3.0)
    assert order is not None and order.incarnation == 2
    (record,) = server.recovery.history
    assert [lost.worker for lost in record.lost] == [1, 3]


def test_a_replacement_that_dies_before_it_greets_is_asked_for_again() -> None:
    server = Server()
    server.lose(1, 0.0)
    server.ask(3, 0.0)
    assert server.lose(3, 1.0) == []
    assert server.recovery.num_wanted_workers(2.0) == 1


def test_a_stage_lost_while_another_is_replaced_makes_that_one_regroup_when_it_is_ready() -> None:
    server = Server()
    server.lose(1, 0.0)
    server.ask(3, 0.0)
    server.regrouped(0, 2, incarnation=1)
    server.recovery.take(hello(3), 0.0)
    # Worker 3 loads; it would not understand a Regroup yet.
    assert server.lose(2, 1.0) == [(0, Regroup(2, PLAN, links(2), PAGES))]
    server.recovery.take(loaded(1), 2.0)
    assert server.recovery.take(ready(1), 2.0) == [(3, Regroup(2, PLAN, links(2), PAGES))]
    server.ask(4, 2.0)
    server.recovery.take(hello(4), 2.0)
    server.recovery.take(loaded(2), 3.0)
    server.recovery.take(ready(2), 3.0)
    server.regrouped(0, incarnation=2)
    assert server.recovery.start_order(3.0) is None
    server.regrouped(1, incarnation=2)
    assert server.recovery.start_order(3.0) is not None


def test_spares_are_asked_for_and_replaced_without_a_recovery() -> None:
    server = Server(spare_workers=2)
    assert server.recovery.num_wanted_workers(2.0) == 2
    server.ask(3, 0.0)
    server.ask(4, 0.0)
    server.recovery.take(hello(3), 1.0)
    assert server.recovery.num_wanted_workers(2.0) == 0
    assert server.lose(3, 2.0) == []
    assert server.recovery.current is None and server.recovery.num_wanted_workers(2.0) == 1


def test_one_loss_too_many_within_the_window_ends_the_server() -> None:
    server = Server(max_restarts=2, restart_window_s=10.0)
    server.lose(0, 0.0)
    server.lose(1, 6.0)
    with pytest.raises(StageFailure, match=r"3 workers .*10 s.* 2") as caught:
        server.lose(2, 9.0)
    assert caught.value.stage == 2 and "--max-stage-restarts" in str(caught.value)


def test_workers_that_a_host_takes_with_it_are_one_loss() -> None:
    server = Server(max_restarts=1, restart_window_s=10.0)
    for worker in range(2):
        server.recovery.lose(worker, "host 1 is lost", 1.0)
    with pytest.raises(StageFailure, match=r"2 workers .*10 s"):
        server.recovery.lose(2, "host 1 is lost", 2.0)


def test_losses_before_the_window_do_not_count() -> None:
    server = Server(max_restarts=2, restart_window_s=10.0)
    server.lose(0, 0.0)
    server.lose(1, 6.0)
    server.lose(2, 10.5)


def test_without_recovery_the_first_loss_ends_the_server_and_is_named() -> None:
    server = Server(mode="off")
    with pytest.raises(StageFailure, match=r"stage 1 .*: killed$"):
        server.lose(1, 0.0)


def test_a_worker_that_does_not_come_or_get_ready_is_late() -> None:
    server = Server(join_limit_s=5.0)
    recovery = server.recovery
    server.lose(1, 100.0)
    server.ask(3, 100.0)
    server.regrouped(0, incarnation=1)
    assert list(recovery.late_workers(105.0)) == []
    assert [worker for worker, _ in recovery.late_workers(105.1)] == [3, 2]
    # A stage that is left need only be done with its step.
    assert [worker for worker, _ in recovery.late_workers(101.1, step_limit_s=1.0)] == [2]
    server.regrouped(2, incarnation=1)
    recovery.take(hello(3), 106.0)
    ((worker, reason),) = recovery.late_workers(106.0)
    assert (worker, reason) == (3, "it did not get ready within 5.0 s")
    recovery.take(loaded(1), 106.0)
    recovery.take(ready(1), 106.0)
    assert list(recovery.late_workers(1000.0)) == []


def test_a_newcomer_whose_memory_is_too_small_is_given_up_for_another() -> None:
    server = Server()
    server.lose(1, 0.0)
    server.ask(3, 0.0)
    server.recovery.take(hello(3), 0.0)
    assert server.recovery.take(loaded(1, num_pages=9), 0.0) == []
    ((worker, reason),) = server.recovery.late_workers(0.0)
    assert worker == 3 and "room for 9 KV pages of stage 1, the pipeline uses 10" in reason
    server.lose(3, 0.0)
    assert server.recovery.num_wanted_workers(0.0) == 1


def test_nobody_regroups_who_was_not_asked_to() -> None:
    server = Server()
    server.lose(1, 0.0)
    with pytest.raises(ProtocolError, match="ready was due"):
        server.regrouped(1, incarnation=1)


def test_a_replacement_gets_the_plan_in_use_and_the_room_of_the_first() -> None:
    server = Server(migration=MigrationArgs(mode="manual", spare_layers=1, weights="resident"))
    server.core.plan = StagePlan(4, (2, 4, 2))
    server.lose(1, 0.0)
    server.ask(3, 0.0)
    ((_, assignment),) = server.recovery.take(hello(3), 0.0)
    assert isinstance(assignment, StageAssignment)
    assert assignment.plan == StagePlan(4, (2, 4, 2)) and assignment.max_layers == 4
    # Of the layers 3 to 5 and one on either side, it has 2 to 5 as its own.
    assert assignment.spare_layers == (6,)


def test_rows_are_kept_on_a_cpu_alone() -> None:
    cpu = StageArgs(model_path="m", dtype="float32")
    gpu = StageArgs(model_path="m", dtype="float32", device="cuda")
    assert PipelineArgs(stages=cpu).log_mib == DEFAULT_LOG_MIB
    assert PipelineArgs(stages=cpu, recovery=RecoveryArgs(log_mib=3)).log_mib == 3
    assert PipelineArgs(stages=cpu, recovery=RecoveryArgs(mode="off")).log_mib == 0
    assert PipelineArgs(stages=gpu, recovery=RecoveryArgs(log_mib=0)).log_mib == 0
    with pytest.raises(ConfigurationError, match=r"--recovery-log-mib 3 .*--device cpu"):
        PipelineArgs(stages=gpu, recovery=RecoveryArgs(log_mib=3))


def test_a_newcomer_on_another_host_has_all_begin_another_incarnation() -> None:
    server = Server()
    told = server.lose(1, 1.0)
    assert [message.incarnation for _, message in told if isinstance(message, Regroup)] == [1, 1]
    server.ask(3, 1.0)
    server.regrouped(0, 2, incarnation=1)
    elsewhere = structs.replace(hello(3), run_directory="there", host_address="10.0.0.2:5000")
    told = server.recovery.take(elsewhere, 2.0)
    (assignment,) = [message for _, message in told if isinstance(message, StageAssignment)]
    regroups = {worker: message for worker, message in told if isinstance(message, Regroup)}
    # What the others were told leads to the host of the lost one.
    assert {message.incarnation for message in regroups.values()} == {2}
    assert {message.links for message in regroups.values()} == {assignment.links}
    assert [*regroups] == [0, 2]
    assert regroups[0].page_links[1] == "tcp:10.0.0.2:5000"
    server.recovery.take(loaded(1), 3.0)
    server.recovery.take(ready(1), 3.0)
    assert server.recovery.start_order(3.0) is None
    server.regrouped(0, 2, incarnation=2)
    order = server.recovery.start_order(4.0)
    assert order is not None and order.incarnation == 2
    assert server.recovery.history[-1].incarnation == 2


def test_workers_that_run_no_step_one_after_the_other_end_the_server() -> None:
    server = Server(max_restarts=100)
    recovery, core = server.recovery, server.core

    def lose_silent(worker: int, now_s: float) -> None:
        recovery.lose(worker, "it has been silent", now_s, was_silent=True)

    core.history.last_steps[1] = 7
    lose_silent(1, 0.0)
    for newcomer in (3, 4, 5):
        server.ask(newcomer, 0.0)
        recovery.take(hello(newcomer), 0.0)
        server.regrouped(0, 2, incarnation=newcomer - 2)
        recovery.take(loaded(1), 0.0)
        recovery.take(ready(1), 0.0)
        if newcomer == 3:
            core.history.last_steps[1] = 9  # it has run steps
        if newcomer < 5:
            lose_silent(newcomer, 1.0)
    with pytest.raises(StageFailure, match=r"3 workers .* --stage-silence-s"):
        lose_silent(5, 1.0)


def test_a_loss_before_the_first_step_belongs_to_the_same_recovery() -> None:
    server = Server()
    recovery, core = server.recovery, server.core
    core.scheduler.add(make_request("a", [1] * 9, 3))
    for worker, newcomer, incarnation in ((1, 3, 1), (3, 4, 2)):
        server.lose(worker, 1.0)
        server.ask(newcomer, 1.0)
        recovery.take(hello(newcomer), 1.0)
        server.regrouped(0, 2, incarnation=incarnation)
        recovery.take(loaded(1), 1.0)
        recovery.take(ready(1), 1.0)
        assert recovery.start_order(2.0) is not None
        assert core.next_step(2.0) is not None
        assert recovery.settle(2.0) is None
    (record,) = recovery.history
    assert [lost.worker for lost in record.lost] == [1, 3] and recovery.unsettled is record
    core.has_run = True
    assert recovery.settle(3.0) is record and record.ended_s == 3.0
