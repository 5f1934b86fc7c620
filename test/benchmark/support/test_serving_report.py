"""The figures of a result, against hand-worked numbers."""

import dataclasses

import pytest

from benchmark.support.serving_report import (
    METRICS,
    Run,
    comparison_table,
    cost_table,
    pipeline_cost,
    spread,
    throughput_ratios,
)
from sgl_pipeline.goodput import LatencyTarget, RequestLatency
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.records.trace import StepRecord


def step(step_id: int, scheduler_ms: float, *stages: tuple[float, float]) -> StepRecord:
    return StepRecord(
        step_id=step_id,
        epoch=0,
        prefill_tokens=30,
        decodes=step_id,
        samples=step_id,
        attended_tokens=step_id,
        waiting_tokens=0,
        running_decodes=0,
        free_page_share=1.0,
        prefill_budget=30,
        decode_budget=step_id,
        bound_by="WT",
        scheduled_s=0.0,
        finished_s=0.0,
        schedule_ms=scheduler_ms / 2,
        result_ms=scheduler_ms / 2,
        stages=tuple(timing(wait_ms * 1e-3, compute_ms * 1e-3) for wait_ms, compute_ms in stages),
    )


def timing(wait_s: float, compute_s: float) -> StageTiming:
    return StageTiming(0.0, 0.0, 0.0, wait_s, *[wait_s + compute_s] * 3)


def run_of(engine: str, round_number: int, throughput: float) -> Run:
    metrics = dict.fromkeys(METRICS, 1.0) | {"total_throughput": throughput}
    return Run(
        engine=engine,
        round=round_number,
        input_tokens=100,
        output_tokens=20,
        duration_s=1.0,
        metrics=metrics,
    )


RUNS = [
    run_of("ours", 1, 400.0),
    run_of("vllm", 1, 500.0),
    run_of("ours", 2, 300.0),
    run_of("vllm", 2, 600.0),
    run_of("ours", 3, 440.0),
    run_of("vllm", 3, 400.0),
]


def test_the_wait_for_the_first_step_is_not_idle_time_of_the_run() -> None:
    records = [
        step(1, 1.0, (9000.0, 10.0), (9010.0, 10.0)),
        step(2, 3.0, (0.0, 30.0), (5.0, 15.0)),
        step(3, 2.0, (0.0, 10.0), (5.0, 15.0)),
    ]
    cost = pipeline_cost(records)
    assert cost is not None
    assert cost.stage_idle_shares == pytest.approx((0.0, 0.25))
    assert cost.mean_scheduler_ms == pytest.approx(2.0)
    assert (cost.num_steps, cost.mean_prefill_tokens, cost.mean_decodes) == (3, 30.0, 2.0)


def test_a_run_without_a_trace_has_no_cost() -> None:
    assert pipeline_cost([]) is None
    assert pipeline_cost([step(1, 1.0, (0.0, 1.0))]) is None
    assert cost_table(RUNS) == ""


def test_the_ratio_is_of_medians() -> None:
    assert throughput_ratios(RUNS, "vllm") == {"ours": 0.8, "vllm": 1.0}


def test_one_round_has_no_spread_to_show() -> None:
    assert str(spread([41.26])) == "41.3"
    assert str(spread([3.0, 1.0, 2.0])) == "2.0 (1.0 to 3.0)"


def test_the_cost_table_has_a_row_for_every_traced_run() -> None:
    records = [step(1, 1.0, (0.0, 1.0)), step(2, 1.0, (1.0, 3.0))]
    traced = dataclasses.replace(RUNS[0], cost=pipeline_cost(records))
    rows = cost_table([traced, *RUNS[1:]]).splitlines()[2:]
    assert rows == ["| ours, round 1 | 2 | 30 + 1.5 | 1.00, 1.00 | 25% | 0% |"]


def test_goodput_has_a_column_where_there_is_a_target() -> None:
    latencies = tuple(RequestLatency(ms, ms / 10) for ms in (100.0, 200.0, 300.0, 400.0))
    runs = [dataclasses.replace(run, latencies=latencies[run.round - 1 :]) for run in RUNS]
    assert "goodput" not in comparison_table(runs, None)
    head, _, ours, _ = comparison_table(runs, None, LatencyTarget(tpot_ms=30.0)).splitlines()
    assert head.endswith("| goodput % |")
    # 3 of 4, 2 of 3 and 1 of 2.
    assert ours.endswith("| 66.7 (50.0 to 75.0) |")
