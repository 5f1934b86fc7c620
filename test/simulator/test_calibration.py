"""Fits of traces whose costs are known."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Literal

import msgspec
import pytest
from support.pipelines import new_scheduler
from support.served_steps import mixed_step

from benchmark.forecasts.predictor_error import made_up_record
from benchmark.support.recorded_run import slowness_of
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.costs.step_costs import LayerCost
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_fit import convex_rows
from sgl_pipeline.records.trace import TraceWriter
from sgl_pipeline.simulator.calibration import (
    FittedCosts,
    fit_records,
    fit_trace,
    fitted_s,
    lone_layer,
)
from sgl_pipeline.simulator.experiment import MeasuredPipeline, simulate
from sgl_pipeline.simulator.pipeline_costs import HostCosts, SimulatedLink
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.simulator.summary import bubble_share, summarize
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import poisson_arrivals
from sgl_pipeline.step_work import StepWork

# Milliseconds a token that is attended to, by a decode and by a prompt's row.
BY_DECODES, BY_PREFILL = 1e-4, 2e-6


def stage(base_ms: float, tail_ms: float, sample_ms: float) -> StepPredictor:
    rows = convex_rows(base_ms, (0.1, 0.0, 0.1, 0.1, 0.0))
    return lone_layer(LayerCost(rows, 0.0, BY_DECODES, BY_PREFILL), tail_ms, sample_ms)


TRUE = FittedCosts(
    (stage(4.0, 0.0, 0.0), stage(4.0, 1.0, 5e-2)),
    noise=((1.0, 1.0),),
    link=SimulatedLink(latency_s=4e-4),
    host=HostCosts(
        schedule_step_s=3e-4,
        prepare_step_s=6e-4,
        result_step_s=2e-4,
        transit_s=8e-4,
        preparation="early",
    ),
    errors=(0.0, 0.0),
)


def simulation(costs: FittedCosts, trace: str, rate_per_s: float) -> Simulation:
    scheduler = new_scheduler(SchedulingArgs(), num_pages=4000, num_stages=2, context_length=16_000)
    workload = poisson_arrivals(load_trace(trace, 60), rate_per_s, Random(0))
    return VirtualPipeline(scheduler, costs).run(workload)


def prompt_rows(tokens: int) -> StepWork:
    """A step of so many rows, as if they attended to nothing."""
    return StepWork(tokens, 0, 0, 0, 0)


def recorded(tmp_path: Path, run: Simulation) -> Path:
    path = tmp_path / "steps.jsonl"
    writer = TraceWriter(path)
    for step in run.steps:
        writer.write(step.record)
    writer.close()
    return path


def test_a_stage_takes_its_base_rows_attended_tokens_and_samples() -> None:
    # 39, 32 and 8 of 40 rows are beyond the first three knots.
    work = StepWork(40, 10, 600, 400, 3)
    stage_ms = 4.0 + 0.1 * 39 + 0.1 * 8 + BY_DECODES * 600 + BY_PREFILL * 400 + 1.0 + 0.05 * 3
    assert fitted_s(TRUE.stages, work)[1] == pytest.approx(stage_ms * 1e-3)


def test_long_prompts_tell_what_decodes_of_short_ones_take(tmp_path: Path) -> None:
    """With one price for all that is attended to, the sample would take what a decode's context
    does, which is short in the step that is asked."""
    fitted = fit_trace(recorded(tmp_path, simulation(TRUE, "azure_conv", 2.0)))
    few, many = (StepWork(rows, rows, 100 * rows, 0, rows) for rows in (1, 24))
    for work in (few, many, StepWork(200, 0, 0, 20_000, 0)):
        assert fitted_s(fitted.stages, work) == pytest.approx(fitted_s(TRUE.stages, work), rel=0.02)


def test_a_short_run_takes_noise_from_all_over_the_record() -> None:
    """A record whose first half was slow: no run of a few steps is at the pace of that half."""
    half = 450
    uneven = replace(TRUE, noise=((1.2, 1.2),) * half + ((0.8, 0.8),) * half)
    shape = StepShape(prefills=((64, 0),), decode_contexts=(), num_samples=0)
    (base_s, _) = fitted_s(TRUE.stages, shape.work)
    for first in range(0, 2 * half, 50):
        taken = [uneven.stage_seconds(shape, first + n)[0] / base_s for n in range(40)]
        assert fmean(taken) == pytest.approx(1.0, abs=0.05)
    whole = sorted(uneven.stage_seconds(shape, n)[0] for n in range(2 * half))
    assert whole == pytest.approx([0.8 * base_s] * half + [1.2 * base_s] * half)


def test_a_fit_predicts_another_load_of_the_pipeline_it_was_taken_from(tmp_path: Path) -> None:
    fitted = fit_trace(recorded(tmp_path, simulation(TRUE, "sharegpt", 6.0)))
    assert max(fitted.errors) < 0.01
    predicted = summarize(simulation(fitted, "azure_conv", 1.0))
    truth = summarize(simulation(TRUE, "azure_conv", 1.0))
    assert predicted.ttft_ms.mean == pytest.approx(truth.ttft_ms.mean, rel=0.03)
    assert predicted.tpot_ms.mean == pytest.approx(truth.tpot_ms.mean, rel=0.03)
    assert predicted.output_tokens_per_s == pytest.approx(truth.output_tokens_per_s, rel=0.03)


def test_the_work_of_hosts_and_the_hops_are_told_apart(tmp_path: Path) -> None:
    fitted = fit_trace(recorded(tmp_path, simulation(TRUE, "sharegpt", 6.0)))
    assert fitted.host.prepare_step_s == pytest.approx(TRUE.host.prepare_step_s, rel=0.01)
    assert fitted.host.schedule_step_s == pytest.approx(TRUE.host.schedule_step_s, rel=0.01)
    assert fitted.link.latency_s == pytest.approx(TRUE.link.latency_s, rel=0.05)


def test_stages_wait_for_the_slow_steps_of_others_as_they_did(tmp_path: Path) -> None:
    random = Random(1)
    slowness = [tuple(random.choice((0.8, 0.9, 0.9, 1.8)) for _ in "ab") for _ in range(997)]
    uneven = replace(TRUE, noise=tuple(slowness))
    truth = simulation(uneven, "sharegpt", 10.0)
    fitted = fit_trace(recorded(tmp_path, simulation(uneven, "sharegpt", 6.0)))
    predicted = simulation(fitted, "sharegpt", 10.0)
    calm = simulation(replace(fitted, noise=((1.0, 1.0),)), "sharegpt", 10.0)
    true_share = bubble_share(truth)
    assert bubble_share(predicted) == pytest.approx(true_share, rel=0.1)
    assert bubble_share(calm) < 0.75 * true_share
    assert summarize(predicted).tpot_ms.mean == pytest.approx(
        summarize(truth).tpot_ms.mean, rel=0.1
    )


def test_steps_larger_than_any_recorded_are_not_free(tmp_path: Path) -> None:
    small = fit_trace(recorded(tmp_path, simulation(TRUE, "sharegpt", 2.0)))
    seconds = [fitted_s(small.stages, prompt_rows(tokens)) for tokens in (1000, 2000)]
    for fewer_s, more_s in zip(*seconds, strict=True):
        assert (more_s - fewer_s) / 1000 > 1e-4


def test_no_part_of_a_fit_is_negative(tmp_path: Path) -> None:
    fitted = fit_trace(recorded(tmp_path, simulation(TRUE, "sharegpt", 6.0)))
    for stage in fitted.stages:
        layer, tail = stage.costs.layer, stage.costs.tail
        times_ms = (0.0, *layer.rows.times_ms)
        assert min(layer.rows.row_ms, layer.prefill_attended_ms, tail.row_ms) >= 0.0
        assert all(more >= less for less, more in pairwise(times_ms))


@pytest.mark.parametrize(("forecast", "is_known"), [("tables", True), ("online", False)])
def test_a_recorded_pipeline_knows_its_step_times_before_the_first_step(
    forecast: Literal["tables", "online"], is_known: bool, tmp_path: Path
) -> None:
    path = recorded(tmp_path, simulation(TRUE, "sharegpt", 6.0))
    pipeline = MeasuredPipeline(trace_path=str(path), pool_tokens=64_000, forecast=forecast)
    requests = poisson_arrivals(load_trace("azure_conv", 5), 2.0, Random(0))
    steps = simulate(
        pipeline, ThrottleArgs(policy="throttle-time"), SchedulingArgs(), requests
    ).steps
    assert (steps[0].record.budget_ms is not None) == is_known


@pytest.mark.parametrize("slowest", [0, 1])
def test_the_slowest_stage_is_what_a_server_knows(slowest: int) -> None:
    stages = TRUE.stages if slowest else TRUE.stages[::-1]
    known = replace(TRUE, stages=stages).known([prompt_rows(40), StepWork(8, 8, 400, 0, 8)])
    assert known.costs.tail == stages[slowest].costs.tail != stages[1 - slowest].costs.tail
    # Layers are taken as alike, whichever stage has them.
    assert known.costs.layer_weights == (1.0, 1.0)


def test_a_short_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text("")
    with pytest.raises(ConfigurationError, match=r"0 steps.* 200"):
        fit_trace(path)


def test_a_slower_run_of_the_same_pipeline_tells_by_how_much(tmp_path: Path) -> None:
    fit = fit_trace(recorded(tmp_path, simulation(TRUE, "sharegpt", 20.0)))
    slower = simulation(TRUE.slowed_by(1.3), "azure_conv", 5.0)
    assert slowness_of([step.record for step in slower.steps], fit) == pytest.approx(1.3, rel=0.05)


def test_a_robust_fit_goes_on_beyond_the_sizes_that_were_measured() -> None:
    """Steps of at most 12 tokens on a stage that takes 2 ms and 0.1 ms a token; a few of those with
    more than 8 tokens are held up, and one in fifty takes ten times as long."""
    records = []
    for number in range(400):
        tokens = 1 + number % 12
        held_up = 1.3 if tokens > 10 and number % 3 else 1.0
        work = mixed_step(0, tokens, samples=0)
        stage_ms = (2.0 + 0.1 * tokens) * (10.0 if number % 50 == 0 else held_up)
        record = made_up_record(work, [stage_ms], step_id=number)
        records.append(msgspec.structs.replace(record, attended_tokens=0))
    (plain_s,), (robust_s,) = (
        fitted_s(fit_records(records, "a run", is_robust=is_robust).stages, prompt_rows(64))
        for is_robust in (False, True)
    )
    assert robust_s == pytest.approx(8.4e-3, rel=0.5)
    assert plain_s > 2 * 8.4e-3
