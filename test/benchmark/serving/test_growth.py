"""What is read off a run's steps, and the table of it."""

import statistics

import pytest
from support.workloads import fixed_lengths

from benchmark.serving.growth import LOADS, growth_of
from benchmark.support.measured_runs import MeasuredLoad
from benchmark.support.serving_report import METRICS, Run
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster, simulate


@pytest.fixture(scope="module")
def measured() -> MeasuredLoad:
    """Four equal requests on two stages, simulated."""
    pipeline = Cluster(model="Qwen2.5-14B", device="a100-40g-pcie", num_stages=2)
    steps = simulate(
        pipeline, ThrottleArgs(policy="throttle"), SchedulingArgs(), fixed_lengths(4, 512, 16)
    ).steps
    run = Run(
        engine="ours",
        round=1,
        input_tokens=2048,
        output_tokens=64,
        duration_s=1.0,
        metrics=dict.fromkeys(METRICS, 7.0),
    )
    return MeasuredLoad(run, tuple(step.record for step in steps))


def test_decode_steps_and_the_largest_prefill_are_told_apart(measured: MeasuredLoad) -> None:
    grown = growth_of("a model", "a load", measured)
    decoding = [record for record in measured.records if record.prefill_tokens == 0]
    assert 0 < len(decoding) < len(measured.records)
    assert grown.decodes_a_step == statistics.median(one.decodes for one in decoding)
    for stage, milliseconds in enumerate(grown.stage_ms):
        assert milliseconds in [one.stages[stage].compute_ms for one in decoding]
    largest = max(record.prefill_tokens for record in measured.records)
    (prefill,) = {
        sum(stage.compute_ms for stage in one.stages)
        for one in measured.records
        if one.prefill_tokens == largest
    }
    assert grown.prefill_us_a_token == pytest.approx(prefill / largest * 1e3)
    assert (grown.mean_tpot_ms, grown.total_tokens_per_s) == (7.0, 7.0)


def test_loads_of_a_kind_differ_in_one_thing() -> None:
    for loads in LOADS.values():
        for name, load in loads.items():
            assert load.range_ratio == 1.0
            number = load.input_tokens if name.startswith("context") else load.num_requests
            assert str(number) in name
