"""What the capacity benchmark makes of its numbers."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmark.forecasts import capacity
from benchmark.forecasts.capacity import Checked, _Bench, mean_stay_s, table, target_of
from benchmark.support.engine import Engine
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.capacity.curve import Estimate
from sgl_pipeline.capacity.load import CapacityLoad, LengthRange
from sgl_pipeline.capacity.predicted import Predicted
from sgl_pipeline.capacity.rate_trial import RateTrial, Round
from sgl_pipeline.goodput import LatencyTarget, RequestLatency
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.simulator.experiment import Cluster, MeasuredPipeline, simulate

CHECKED = Checked(
    load="256 in, 64 out",
    target=LatencyTarget(ttft_ms=400.0, tpot_ms=60.0),
    predicted=Estimate(3.3, 3.0, 3.5),
    at_pace=Estimate(2.85, 2.7, 3.0),
    measured=Estimate(3.0, 2.8, 3.2),
    ratio=Estimate(1.1, 1.02, 1.18),
    ratio_at_pace=Estimate(0.95, 0.9, 0.99),
    slowness=1.16,
    slower_share=0.9,
    arrives_s=13.4,
    stays_s=2.34,
)


def test_errors_are_of_the_prediction_as_shares_of_what_was_measured() -> None:
    row = table([CHECKED]).splitlines()[-1]
    assert row == (
        "| 256 in, 64 out | 400, 60 | 3 (2.8 to 3.2) | 3.3 (3 to 3.5) | +10.0% (+2% to +18%) "
        "| 2.85 (2.7 to 3) | -5.0% (-10% to -1%) | 1.16 | -10% | 13, 2.3 |"
    )


def test_the_record_is_json() -> None:
    record = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(CHECKED)))
    assert record["measured"] == {"value": 3.0, "low": 2.8, "high": 3.2}
    assert record["target"] == {"ttft_ms": 400.0, "tpot_ms": 60.0}


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
    """The recorded pipeline itself, SLOWNESS times as slow, in the place of a server."""

    pipeline: MeasuredPipeline
    steps: list[StepRecord]

    def __init__(self, url: str, client: object, load: CapacityLoad) -> None:
        self._predicted = Predicted(
            pipeline=replace(self.pipeline, slowness=SLOWNESS),
            throttle=ThrottleArgs(policy="throttle"),
            scheduling=SchedulingArgs(radix_cache=False),
            load=load,
        )
        self.alone = self._predicted.alone

    def serve(self, rate_per_s: float, number: int) -> Round:
        one = self._predicted
        requests = one.load.requests(rate_per_s, number)
        found = simulate(one.pipeline, one.throttle, one.scheduling, requests)
        self.steps += [step.record for step in found.steps]
        return one.serve(rate_per_s, number)


def test_a_server_that_is_the_simulator_has_the_capacity_predicted_at_its_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = CapacityLoad(source=capacity.LOADS["256 in, 64 out"][0], num_requests=40, seed=5)
    cluster = Cluster(model="Qwen2.5-14B", device="a100-40g-pcie", num_stages=2, pool_tokens=32_768)
    recorded = simulate(
        cluster, ThrottleArgs(policy="throttle"), SchedulingArgs(), load.requests(3.0, 0)
    )
    path = tmp_path / "steps.jsonl"
    capacity.write_steps(path, [step.record for step in recorded.steps])
    VirtualServer.pipeline = MeasuredPipeline(trace_path=str(path), pool_tokens=32_768)
    VirtualServer.steps = []
    monkeypatch.setattr(capacity, "MeasuredServer", VirtualServer)
    monkeypatch.setattr(_Bench, "_new_steps", lambda self: VirtualServer.steps)
    engine = Engine(label="none", client_backend="sglang", base_url="http://127.0.0.1:9")
    options: Any = Namespace(scale=1.5, rounds=1)
    found = _Bench(engine, options).check("256 in, 64 out", VirtualServer.pipeline)
    assert found.slowness == pytest.approx(SLOWNESS, rel=0.1)
    assert found.ratio_at_pace.value == pytest.approx(1.0, abs=0.05)
    assert found.ratio.value > 1.02
    assert found.slower_share < 1.0
