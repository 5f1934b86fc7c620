"""How the calibration finds the front's share of the time to the first token."""

import pytest
from support.step_records import step_record

from benchmark.forecasts.calibrate import CALIBRATION_LOADS, Round, _at_once
from benchmark.support.measured_runs import MeasuredLoad
from benchmark.support.serving_report import Run
from sgl_pipeline.simulator.experiment import MeasuredPipeline

SERVER_TTFT_MS = 1500.0  # of the request that `step_record` ends


def measured(front_ms: float) -> MeasuredLoad:
    """A load whose clients waited for so much longer than the server tells."""
    metrics = {"mean_ttft_ms": SERVER_TTFT_MS + front_ms}
    run = Run(
        engine="ours", round=1, input_tokens=3, output_tokens=2, duration_s=3.0, metrics=metrics
    )
    return MeasuredLoad(run, (step_record(0),))


def test_the_front_has_a_share_for_bursts_and_one_for_single_requests() -> None:
    bursts = [load for load in CALIBRATION_LOADS if _at_once(load)]
    assert 0 < len(bursts) < len(CALIBRATION_LOADS)
    # Bursts have 60, 61, ... ms in the front, single requests 10, 11, ...
    burst_ms, single_ms = iter(range(60, 100)), iter(range(10, 60))
    loads = [
        measured(next(burst_ms if _at_once(load) else single_ms)) for load in CALIBRATION_LOADS
    ]
    pipeline = MeasuredPipeline(trace_path="unused", pool_tokens=1)
    one = Round(tuple(loads), (), pipeline)
    assert one.front_ms(at_once=True) == pytest.approx(60 + (len(bursts) - 1) / 2)
    num_single = len(CALIBRATION_LOADS) - len(bursts)
    assert one.front_ms(at_once=False) == pytest.approx(10 + (num_single - 1) / 2)
