"""A step with leases is booked when all stages have reported it, and later ones behind it."""

import msgspec
import pytest
from support.pipelines import make_request, new_scheduler
from support.step_records import timing

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pipeline.offload_rule import OffloadRule
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.requests import (
    FinishReason,
    Lease,
    LogprobRows,
    LogprobSpec,
    Request,
    RequestState,
    Room,
)
from sgl_pipeline.scheduling import RecoveryLog
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.lease_orders import OffloadedWork
from sgl_pipeline.wire.stage_messages import StageReport
from sgl_pipeline.wire.stage_orders import OrderReader
from sgl_pipeline.wire.step_order import StepOrder

PAGE_SIZE = 4
LEASED = 8
LEASE = Lease("p:1", 5)


def new_core(num_stages: int = 2, log: RecoveryLog | None = None) -> PipelineCore:
    scheduler = new_scheduler(num_pages=32, num_stages=num_stages, context_length=128, log=log)
    scheduler.tier.read_peers(4)
    return PipelineCore(scheduler, StagePlan(0, (1,) * num_stages), vocab_size=9)


def add_leased(core: PipelineCore, name: str = "there", *, logprobs: bool = False) -> Request:
    """Its prompt's last three tokens are not computed."""
    request = make_request(name, range(LEASED + 3), 3)
    request.room = Room(LEASE.number, LEASE.source)
    if logprobs:
        request.logprobs = LogprobSpec(len(request.prompt_ids))
    core.scheduler.add(request)
    core.scheduler.offloaded.begin(request, LEASE, LEASED)
    return request


def report(
    stage: int, step_id: int, token_ids: tuple[int, ...] | None = None, *, lost: bool = False
) -> StageReport:
    return StageReport(
        stage=stage,
        step_id=step_id,
        epoch=0,
        timing=timing(stage),
        token_ids=token_ids,
        lost_leases=(LEASE.number,) if lost else (),
    )


def test_chunks_with_a_lease_come_last_and_have_one_page() -> None:
    core = new_core()
    there = add_leased(core)
    core.scheduler.add(make_request("here", [1, 2, 3], 3))
    step = core.next_step(0.0)
    assert step is not None and step.leased_rows == 3
    assert [chunk.request.request_id for chunk in step.microbatch.chunks] == ["here", "there"]
    order = OrderReader().open(step.order)
    assert isinstance(order, StepOrder)
    assert [one.lease for one in order.opens] == [None, LEASE]
    chunk = order.chunks[1]
    assert (chunk.start, chunk.length, len(chunk.new_pages)) == (LEASED, 3, 4)
    assert len(there.pages) == 1 and step.microbatch.work.prefill_attended_tokens == 6
    core.scheduler.check_invariants()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_tokens_wait_for_the_reports_of_all_stages(order: tuple[int, int]) -> None:
    core = new_core()
    there = add_leased(core)
    step = core.next_step(0.0)
    reports = {0: report(0, 0), 1: report(1, 0, (7,))}
    assert core.take_report(reports[order[0]], 1.0) == []
    assert there.output_ids == []
    assert core.take_report(reports[order[1]], 2.0) == [step]
    assert there.output_ids == [7] and step is not None and step.finished_s == 2.0
    (record,) = core.take_events()
    assert isinstance(record, StepRecord) and record.leased_rows == 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("loser", [0, 1])
def test_what_was_drawn_from_a_lost_lease_is_dropped(order: tuple[int, int], loser: int) -> None:
    core = new_core()
    there = add_leased(core, logprobs=True)
    here = make_request("here", [1, 2, 3], 3)
    core.scheduler.add(here)
    step = core.next_step(0.0)
    rows = LogprobRows(1, b"\0" * 4)
    reports = {0: report(0, 0, lost=loser == 0), 1: report(1, 0, (4, 7), lost=loser == 1)}
    reports[1] = StageReport(
        stage=1,
        step_id=0,
        epoch=0,
        timing=timing(1),
        token_ids=(4, 7),
        logprobs=(rows,),
        lost_leases=reports[1].lost_leases,
    )
    for stage in order:
        core.take_report(reports[stage], 1.0)
    assert step is not None and step.is_booked
    assert here.output_ids == [4] and there.output_ids == [] and there.num_logprob_rows == 0
    assert there.state is RequestState.WAITING and there.lease is None and not there.pages
    assert there.num_retractions == 1
    assert core.scheduler.offloaded.take_ended() == [(there, LEASE)]
    core.scheduler.check_invariants()
    # It computes its whole prompt here, described anew.
    again = core.next_step(1.0)
    assert again is not None and again.leased_rows == 0
    assert (again.microbatch.chunks[-1].request, again.microbatch.chunks[-1].length) == (there, 11)


def test_what_a_lost_lease_gives_to_a_request_that_has_ended_is_dropped() -> None:
    core = new_core()
    there = add_leased(core, logprobs=True)
    core.next_step(0.0)
    core.scheduler.abort("there", FinishReason("abort"))
    core.take_report(report(0, 0, lost=True), 1.0)
    rows = LogprobRows(1, b"\0" * 4)
    last = msgspec.structs.replace(report(1, 0, (7,)), logprobs=(rows,))
    assert len(core.take_report(last, 1.0)) == 1
    assert there.output_ids == [] and there.num_logprob_rows == 0


def test_a_later_step_waits_behind_it() -> None:
    core = new_core()
    there = add_leased(core)
    first = core.next_step(0.0)
    here = make_request("here", [1, 2, 3], 3)
    core.scheduler.add(here)
    second = core.next_step(0.0)
    assert first is not None and second is not None and second.leased_rows == 0
    assert core.take_report(report(1, 0, (7,)), 1.0) == []
    assert core.take_report(report(1, 1, (8,)), 1.5) == []
    assert core.take_events() == [] and here.output_ids == []
    assert core.take_report(report(0, 0), 2.0) == [first, second]
    assert (there.output_ids, here.output_ids) == ([7], [8])
    core.take_report(report(0, 1), 3.0)
    assert [one.step_id for one in core.take_events() if isinstance(one, StepRecord)] == [0, 1]


def test_a_wrong_result_is_refused_when_it_comes() -> None:
    core = new_core()
    add_leased(core)
    core.next_step(0.0)
    core.scheduler.add(make_request("here", [1, 2, 3], 3))
    core.next_step(0.0)
    with pytest.raises(ProtocolError, match="drew 2 tokens, 1 are due"):
        core.take_report(report(1, 0, (7, 7)), 1.0)
    core.take_report(report(1, 0, (7,)), 1.0)
    with pytest.raises(ProtocolError, match="drew 2 tokens, 1 are due"):
        core.take_report(report(1, 1, (7, 7)), 1.0)
    core.take_report(report(1, 1, (8,)), 1.0)
    assert len(core.take_report(report(0, 0), 1.0)) == 2


def test_a_lost_stage_takes_back_results_that_wait() -> None:
    core = new_core()
    there = add_leased(core)
    core.next_step(0.0)
    core.take_report(report(1, 0, (7,)), 1.0)
    core.halt([0], "lost", 2.0)
    assert there.output_ids == [] and there.lease is None and there.num_retractions == 1
    core.start_over(1)
    assert core.take_report(report(0, 0), 2.0) == []
    step = core.next_step(2.0)
    assert step is not None
    assert core.take_report(report(0, 1), 3.0) == []
    assert core.take_report(report(1, 1, (5,)), 3.0) == [step]
    assert there.output_ids == [5]


@pytest.mark.parametrize("steps_back", [0, 1])
def test_a_lease_that_is_over_ends_when_its_steps_have_come_back(steps_back: int) -> None:
    core = new_core(num_stages=3)
    there = add_leased(core)
    core.next_step(0.0)
    for stage in range(3):
        core.take_report(report(stage, 0, (7,) if stage == 2 else None), 1.0)
    if not steps_back:
        core.next_step(1.0)
    core.scheduler.offloaded.end(there)
    assert (there.lease is None) == bool(steps_back)
    if not steps_back:
        assert core.next_step(1.0) is None, "nothing of it begins any more"
        for stage in range(3):
            core.take_report(report(stage, 1, (8,) if stage == 2 else None), 2.0)
    assert there.lease is None and there.output_ids == [7]
    assert core.scheduler.offloaded.take_ended() == [(there, LEASE)]
    core.scheduler.check_invariants()


def test_the_log_of_rows_knows_nothing_of_leases() -> None:
    log = RecoveryLog(2, PAGE_SIZE, 32)
    core = new_core(log=log)
    there = add_leased(core)
    core.next_step(0.0)
    assert not log._logged
    core.take_report(report(0, 0), 1.0)
    core.take_report(report(1, 0, (7,)), 1.0)
    core.halt([0], "lost", 2.0)
    assert there.lease is None and not log.all_owed()
    core.start_over(1)
    assert core.next_step(2.0) is not None and log._logged


def test_rates_are_learned_from_reports() -> None:
    core = new_core(num_stages=1)
    core.offload = rule = OffloadRule(core.scheduler, None)
    add_leased(core)
    core.next_step(0.0)
    work = OffloadedWork(2, 100, 50, 0.1, 0.2, 0.25, 0.1)
    late = StageReport(
        stage=0, step_id=0, epoch=0, timing=timing(0), token_ids=(7,), offloaded=work
    )
    core.take_report(late, 1.0)
    assert rule.rates.local_rate == pytest.approx(2 * 100 / 0.1)
    assert rule.rates.remote_rate == pytest.approx(2 * 50 / 0.2)
    assert rule.rates.exchange_s == pytest.approx(0.05 / 2)


def test_predictions_learn_nothing_from_steps_with_leases() -> None:
    core = new_core(num_stages=1)
    add_leased(core)
    online = core.step_forecast._online
    assert online is not None
    core.next_step(0.0)
    core.take_report(report(0, 0, (7,)), 1.0)
    core.take_events()
    assert online._num_seen == 0
    core.scheduler.offloaded.end_last()
    core.next_step(1.0)
    core.take_report(report(0, 1, (7,)), 2.0)
    core.take_events()
    assert online._num_seen == 1
