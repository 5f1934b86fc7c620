"""What the capacity benchmark makes of its numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmark.forecasts import capacity_bench
from benchmark.forecasts.capacity_bench import (
    LOADS,
    MEASURED,
    CapacityBench,
    Checked,
    mean_stay_s,
    target_of,
)
from benchmark.forecasts.capacity_tables import capacity_table, trial_table
from benchmark.support.engine import Engine
from benchmark.support.recorded_run import write_steps
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.capacity import predicted
from sgl_pipeline.capacity.curve import Estimate
from sgl_pipeline.capacity.load import CapacityLoad, LengthRange
from sgl_pipeline.capacity.predicted import Predicted
from sgl_pipeline.capacity.processor_use import ProcessorUse
from sgl_pipeline.capacity.rate_trial import RateTrial, Round
from sgl_pipeline.capacity.result import rate_rows
from sgl_pipeline.goodput import LatencyTarget, RequestLatency
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.simulator.experiment import Cluster, MeasuredPipeline, simulate
from sgl_pipeline.simulator.simulation import Simulation

TARGET = LatencyTarget(ttft_ms=400.0, tpot_ms=60.0)
TRIAL = RateTrial(
    3.0,
    (
        Round(
            (RequestLatency(300.0, 70.0), RequestLatency(300.0, 50.0), None),
            900.0,
            ProcessorUse(4.0, {"front": 1.0, "stages": 7.0, "others": 0.0}),
        ),
    ),
)
CHECKED = Checked(
    load="256 in, 64 out",
    target=TARGET,
    predicted=Estimate(3.3, 3.0, 3.5),
    at_pace=Estimate(2.85, 2.7, 3.0),
    measured=Estimate(3.0, 2.8, 3.2),
    ratio=Estimate(1.1, 1.02, 1.18),
    ratio_at_pace=Estimate(0.95, 0.9, 0.99),
    slowness=1.16,
    slower_share=0.9,
    arrives_s=13.4,
    stays_s=2.34,
    front_ms=15.0,
    trials={MEASURED: rate_rows([TRIAL], TARGET)},
)


def test_errors_are_of_the_prediction_as_shares_of_what_was_measured() -> None:
    row = capacity_table([CHECKED]).splitlines()[-1]
    assert row == (
        "| 256 in, 64 out | 400, 60 | 3 (2.8 to 3.2) | 3.3 (3 to 3.5) | +10.0% (+2% to +18%) "
        "| 2.85 (2.7 to 3) | -5.0% (-10% to -1%) | 1.16 | -10% | 13, 2.3 |"
    )


def test_a_trial_shows_which_target_was_missed_and_what_the_cores_did() -> None:
    row = trial_table([CHECKED]).splitlines()[-1]
    assert row == (
        "| 256 in, 64 out | measured | 3 | 33% | 67% | 33% | 300, 300, 300 | 60.0, 68.0, 69.8 "
        "| front 0.25, stages 1.75 |"
    )


def test_the_record_is_json() -> None:
    record = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(CHECKED)))
    assert record["measured"] == {"value": 3.0, "low": 2.8, "high": 3.2}
    assert record["target"] == {"ttft_ms": 400.0, "tpot_ms": 60.0}
    (trial,) = record["trials"][MEASURED]
    assert trial["processors"]["seconds"]["front"] == 1.0


def test_a_stay_is_from_arrival_to_the_last_token_near_the_capacity() -> None:
    load = CapacityLoad(
        source=LengthRange(input_tokens=8, output_tokens=5, ratio=1.0), num_requests=3
    )
    latencies = (RequestLatency(100.0, 50.0), None, RequestLatency(300.0, 50.0))
    near, far = RateTrial(2.0, (Round(latencies, 1.0),)), RateTrial(9.0, ())
    assert mean_stay_s(load, [near, far], 2.5) == pytest.approx(0.4)


def test_targets_follow_what_requests_get_alone() -> None:
    alone = Round((*[RequestLatency(100.2, 20.1)] * 9, RequestLatency(100.2, None), None), 1.0)
    assert target_of(alone) == LatencyTarget(ttft_ms=401.0, tpot_ms=51.0)


SLOWNESS = 1.15


class VirtualServer:
    """The recorded pipeline itself, SLOWNESS times as slow, in the place of a server; `steps` are
    those of the loads that it served."""

    pipeline: MeasuredPipeline
    steps: list[StepRecord]

    def __init__(self, url: str, client: object, load: CapacityLoad, pid: int) -> None:
        self._predicted = Predicted(
            pipeline=replace(self.pipeline, slowness=SLOWNESS),
            throttle=ThrottleArgs(policy="throttle"),
            scheduling=SchedulingArgs(radix_cache=False),
            load=load,
        )
        self.alone = self._predicted.alone

    def serve(self, rate_per_s: float, number: int) -> Round:
        def recorded(*args: Any) -> Simulation:
            found = simulate(*args)
            self.steps += [step.record for step in found.steps]
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(predicted, "simulate", recorded)
            return self._predicted.serve(rate_per_s, number)


def test_a_server_that_is_the_simulator_has_the_capacity_predicted_at_its_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = CapacityLoad(source=LOADS["256 in, 64 out"][0], num_requests=40, seed=5)
    cluster = Cluster(model="Qwen2.5-14B", device="a100-40g-pcie", num_stages=2, pool_tokens=32_768)
    recorded = simulate(
        cluster, ThrottleArgs(policy="throttle"), SchedulingArgs(), load.requests(3.0, 0)
    )
    path = tmp_path / "steps.jsonl"
    write_steps(path, [step.record for step in recorded.steps])
    VirtualServer.pipeline = MeasuredPipeline(trace_path=str(path), pool_tokens=32_768)
    VirtualServer.steps = []
    monkeypatch.setattr(capacity_bench, "MeasuredServer", VirtualServer)
    monkeypatch.setattr(CapacityBench, "_new_steps", lambda self: VirtualServer.steps)
    engine = Engine(label="none", client_backend="sglang", base_url="http://127.0.0.1:9")
    bench = CapacityBench(engine, server_pid=1, scale=1.5, num_rounds=1, vocab_size=512)
    found = bench.check("256 in, 64 out", VirtualServer.pipeline)
    assert found.slowness == pytest.approx(SLOWNESS, rel=0.1)
    assert found.ratio_at_pace.value == pytest.approx(1.0, abs=0.05)
    assert found.ratio.value > 1.02
    assert found.slower_share < 1.0
