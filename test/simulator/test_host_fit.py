"""What orders, inputs, hops and results of a recorded run take."""

from functools import lru_cache
from itertools import pairwise
from random import Random

import msgspec
import pytest
from support.pipelines import new_scheduler

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.costs.step_costs import LayerCost
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_fit import convex_rows
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.simulator.calibration import FittedCosts, lone_layer
from sgl_pipeline.simulator.host_fit import fit_host
from sgl_pipeline.simulator.pipeline_costs import HostCosts, SimulatedLink
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import poisson_arrivals

HOST = HostCosts(
    schedule_step_s=4e-4,
    schedule_chunk_s=1e-5,
    prepare_step_s=1e-3,
    prepare_chunk_s=2e-5,
    result_step_s=2e-4,
    result_token_s=5e-6,
    transit_s=8e-4,
    preparation="early",
)
LINK = SimulatedLink(latency_s=5e-4)
# Requests a second: one is over before the next one comes.
LIGHT = 0.02


def stage(base_ms: float) -> StepPredictor:
    rows = convex_rows(base_ms, (0.1, 0.0, 0.1, 0.1, 0.0))
    return lone_layer(LayerCost(rows, 0.0, 1e-4, 2e-6), 0.0, 0.0)


def run_of(host: HostCosts, rate_per_s: float) -> list[StepRecord]:
    return [*_steps(host, rate_per_s)]


@lru_cache
def _steps(host: HostCosts, rate_per_s: float) -> tuple[StepRecord, ...]:
    random = Random(1)
    noise = tuple((random.uniform(0.8, 1.2), random.uniform(0.8, 1.2)) for _ in range(97))
    costs = FittedCosts((stage(4.0), stage(4.0)), noise, LINK, host, (0.0, 0.0))
    scheduler = new_scheduler(SchedulingArgs(), num_pages=8000, num_stages=2, context_length=16_000)
    workload = poisson_arrivals(load_trace("sharegpt", 70), rate_per_s, Random(0))
    return tuple(step.record for step in VirtualPipeline(scheduler, costs).run(workload).steps)


def alone(records: list[StepRecord]) -> list[StepRecord]:
    """The steps that were decided when no other one was on its way."""
    return [one for before, one in pairwise(records) if before.finished_s <= one.scheduled_s]


def test_each_part_is_found_with_what_it_takes_by_the_token() -> None:
    found, link = fit_host(run_of(HOST, 8.0))
    assert link.latency_s == pytest.approx(LINK.latency_s, rel=0.02)
    assert found.transit_s == pytest.approx(HOST.transit_s, rel=0.02)
    # Samples stand for the chunks of a step: of a prompt in chunks only the last one has any.
    for tokens in (4, 32):
        for name in ("schedule", "prepare", "result"):
            method = getattr(HostCosts, f"{name}_s")
            assert method(found, tokens) == pytest.approx(method(HOST, tokens), rel=0.15), name


def test_waits_for_a_core_count_as_their_mean() -> None:
    """One inputs' work in ten waits for a time slice of 3 ms: the fifth percentile has none."""
    records = run_of(HOST, 8.0)
    waiting = [_later_inputs(one, 3e-3) if n % 10 == 0 else one for n, one in enumerate(records)]
    calm, found = (fit_host(each)[0].prepare_s(16) for each in (records, waiting))
    assert found - calm == pytest.approx(3e-4, rel=0.3)


def test_a_stage_that_was_replaced_is_no_hosts_work() -> None:
    records = run_of(HOST, 8.0)
    records[200] = _later_inputs(records[200], 20.0)
    calm = fit_host(run_of(HOST, 8.0))[0]
    assert fit_host(records)[0].prepare_s(16) == pytest.approx(calm.prepare_s(16), rel=0.01)


def test_one_wait_of_few_for_a_stage_that_stopped_is_no_hosts_work() -> None:
    """Twenty idle steps, in one of which the stages stood still for 5 s."""
    records = alone(run_of(HOST, LIGHT))[:21]
    calm = fit_host(records)[0]
    records[9] = _later_inputs(records[9], 5.0)
    found = fit_host(records)[0]
    assert found.schedule_s(1) == pytest.approx(calm.schedule_s(1), rel=0.01)
    assert found.prepare_s(1) == pytest.approx(calm.prepare_s(1), rel=0.01)
    assert found.transit_s == pytest.approx(calm.transit_s, rel=0.01)


def test_a_light_run_tells_what_steps_take_beside_others() -> None:
    """No stage had an order before it was free; the stages' own moments say what inputs take."""
    found, link = fit_host(alone(run_of(HOST, LIGHT)))
    assert link.latency_s == pytest.approx(LINK.latency_s, rel=0.02)
    assert found.transit_s == pytest.approx(HOST.transit_s, rel=0.02)
    for name in ("schedule", "prepare", "result"):
        method = getattr(HostCosts, f"{name}_s")
        assert method(found, 1) == pytest.approx(method(HOST, 1), rel=0.02), name


@pytest.mark.parametrize("seed", range(5))
def test_idle_steps_of_few_tokens_tell_no_slope(seed: int) -> None:
    """Waits of 1 ms on average at 1 to 4 tokens are not 64 ms at 64."""
    random = Random(seed)
    records = [_later_inputs(one, random.expovariate(1e3)) for one in run_of(HOST, 1.5)]
    assert {one.samples for one in records} >= {1, 2, 3, 4}
    found = fit_host(records)[0]
    assert found.prepare_s(64) == pytest.approx(HOST.prepare_s(2) + 1e-3, rel=0.15)
    assert found.schedule_s(64) == pytest.approx(HOST.schedule_s(2), rel=0.05)


def test_a_scheduler_whose_core_the_stage_takes_has_sent_its_order() -> None:
    """It is done with the other stages' orders 5 ms later, when the first one computes."""
    records = run_of(HOST, 8.0)
    slow = [msgspec.structs.replace(one, schedule_ms=one.schedule_ms + 5.0) for one in records]
    plain, found = (fit_host(alone(each))[0] for each in (records, slow))
    assert found.schedule_s(8) == pytest.approx(plain.schedule_s(8), rel=0.01)
    assert found.transit_s == pytest.approx(plain.transit_s, rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_steps_of_few_and_many_tokens_tell_a_slope_among_waits(seed: int) -> None:
    random = Random(seed)
    records = [_later_inputs(one, random.expovariate(4e3)) for one in run_of(HOST, 8.0)]
    found = fit_host(records)[0]
    assert found.prepare_s(64) == pytest.approx(HOST.prepare_s(64) + 2.5e-4, rel=0.2)


def test_drafts_make_no_more_chunks() -> None:
    records = run_of(HOST, 8.0)
    with_drafts = [
        msgspec.structs.replace(
            one, samples=one.samples + 3 * one.decodes, draft_tokens=3 * one.decodes
        )
        for one in records
    ]
    plain, found = (fit_host(each)[0] for each in (records, with_drafts))
    assert found.schedule_s(32) == plain.schedule_s(32)
    assert found.prepare_s(32) == plain.prepare_s(32)
    # A decode that has three drafts gives four rows to the result.
    assert found.result_s(128) == pytest.approx(plain.result_s(32), rel=0.05)


def test_the_way_of_an_order_is_none_of_the_schedulers_time() -> None:
    """Orders take 2 ms to the stages, all of which wait for them."""
    records = alone(run_of(HOST, LIGHT))
    late = [_later(one, number * 2e-3, 2e-3) for number, one in enumerate(records)]
    found = fit_host(late)[0]
    assert found.schedule_s(1) == pytest.approx(HOST.schedule_s(1), rel=0.02)
    assert found.prepare_s(1) == pytest.approx(HOST.prepare_s(1), rel=0.02)
    assert found.transit_s == pytest.approx(HOST.transit_s + 2e-3, rel=0.02)


def test_messages_for_which_no_stage_waited_take_what_those_on_the_way_back_do() -> None:
    """Orders are there a second early, and rows before the inputs."""
    records = [
        msgspec.structs.replace(
            one,
            scheduled_s=one.scheduled_s - 1.0,
            stages=(
                one.stages[0],
                msgspec.structs.replace(one.stages[1], inputs_s=one.stages[1].activations_s),
            ),
        )
        for one in run_of(HOST, 8.0)
    ]
    found, link = fit_host(records)
    assert found.transit_s == pytest.approx(2 * HOST.transit_s, rel=0.02)
    assert link.latency_s == pytest.approx(HOST.transit_s, rel=0.02)


def test_hosts_that_take_no_time_have_none() -> None:
    found, link = fit_host(run_of(HostCosts(preparation="early"), 8.0))
    assert found.schedule_s(64) + found.prepare_s(64) + found.result_s(64) < 1e-5
    assert found.transit_s < 1e-6
    assert link.latency_s == pytest.approx(LINK.latency_s, rel=0.02)


def _later(record: StepRecord, before_s: float, order_s: float) -> StepRecord:
    """The same step, decided `before_s` later, whose order took `order_s` more."""
    by_s = before_s + order_s
    return msgspec.structs.replace(
        record,
        scheduled_s=record.scheduled_s + before_s,
        finished_s=record.finished_s + by_s,
        stages=tuple(one.shifted(by_s) for one in record.stages),
    )


def _later_inputs(record: StepRecord, by_s: float) -> StepRecord:
    """The same step, whose inputs were built `by_s` later on all stages."""
    stages = tuple(
        msgspec.structs.replace(one, inputs_s=one.inputs_s + by_s) for one in record.stages
    )
    return msgspec.structs.replace(record, stages=stages)
