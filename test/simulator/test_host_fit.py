"""What orders, inputs, hops and results of a recorded run take."""

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


def stage(base_ms: float) -> StepPredictor:
    rows = convex_rows(base_ms, (0.1, 0.0, 0.1, 0.1, 0.0))
    return lone_layer(LayerCost(rows, 0.0, 1e-4, 2e-6), 0.0, 0.0)


def run_of(host: HostCosts, rate_per_s: float) -> list[StepRecord]:
    random = Random(1)
    noise = tuple((random.uniform(0.8, 1.2), random.uniform(0.8, 1.2)) for _ in range(97))
    costs = FittedCosts((stage(4.0), stage(4.0)), noise, LINK, host, (0.0, 0.0))
    scheduler = new_scheduler(SchedulingArgs(), num_pages=8000, num_stages=2, context_length=16_000)
    workload = poisson_arrivals(load_trace("sharegpt", 150), rate_per_s, Random(0))
    return [step.record for step in VirtualPipeline(scheduler, costs).run(workload).steps]


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
    assert fit_host(records)[0].prepare_s(16) == pytest.approx(calm.prepare_s(16), rel=0.05)


def test_hosts_that_take_no_time_have_none() -> None:
    found, link = fit_host(run_of(HostCosts(preparation="early"), 8.0))
    assert found.schedule_s(64) + found.prepare_s(64) + found.result_s(64) < 1e-5
    assert found.transit_s < 1e-6
    assert link.latency_s == pytest.approx(LINK.latency_s, rel=0.02)


def _later_inputs(record: StepRecord, by_s: float) -> StepRecord:
    """The same step, whose inputs were built `by_s` later on all stages."""
    stages = tuple(
        msgspec.structs.replace(one, inputs_s=one.inputs_s + by_s) for one in record.stages
    )
    return msgspec.structs.replace(record, stages=stages)
