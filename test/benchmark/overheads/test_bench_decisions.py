"""The load of the decision benchmark keeps its size, and its figures are those of the calls."""

import dataclasses

from benchmark.overheads.bench_decisions import SCENARIOS, decision_table, summarize
from benchmark.overheads.decision_load import DecisionLoad, Scenario, Timings

SMALL = Scenario(
    name="small",
    waiting=40,
    prompt_tokens=60,
    shared_tokens=30,
    num_prefixes=2,
    running=16,
    output_tokens=(20, 40),
)


def test_queue_and_pipeline_stay_full() -> None:
    timings = DecisionLoad(SMALL).measure(100)
    assert len(timings.elapsed_s["on_result"]) == 100
    assert len(timings.elapsed_s["next_microbatch"]) >= 100
    assert timings.elapsed_s["add"]
    assert 14 < timings.mean_running <= 16
    assert timings.num_retractions == 0


def test_a_pool_that_is_too_small_makes_it_retract() -> None:
    crowded = dataclasses.replace(
        SMALL, prompt_tokens=20, shared_tokens=10, pool_share=0.4, policy="sarathi"
    )
    assert DecisionLoad(crowded).measure(300).num_retractions > 0


def test_a_row_has_median_99th_percentile_and_maximum_in_milliseconds() -> None:
    timings = Timings()
    timings.elapsed_s["on_result"] = [number / 1000 for number in range(1, 102)]
    timings.processor_s["on_result"] = [0.001] * 101
    row = summarize(SMALL, timings)
    assert row["elapsed_ms"]["on_result"] == {"median": 51.0, "p99": 100.0, "max": 101.0}
    assert row["elapsed_ms"]["add"] is None
    table = decision_table([row])
    assert "| small | 0 | 0 | none | 51.00, 100.00, 101.00 (p99 of processor time 1.00) |" in table


def test_the_target_is_among_the_scenarios() -> None:
    target = next(scenario for scenario in SCENARIOS if "target" in scenario.name)
    assert (target.waiting, target.prompt_tokens, target.running) == (10_000, 2000, 512)
