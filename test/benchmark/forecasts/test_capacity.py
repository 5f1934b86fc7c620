"""What the capacity benchmark makes of its numbers."""

import msgspec
import pytest

from benchmark.forecasts.capacity import Checked, _as_record, table, target_of
from sgl_pipeline.capacity.curve import Estimate
from sgl_pipeline.capacity.rate_trial import Round
from sgl_pipeline.goodput import LatencyTarget, RequestLatency

CHECKED = Checked(
    load="256 in, 64 out",
    target=LatencyTarget(ttft_ms=400.0, tpot_ms=60.0),
    predicted=Estimate(3.3, 3.0, 3.5),
    at_pace=Estimate(2.85, 2.7, 3.0),
    measured=Estimate(3.0, 2.8, 3.2),
    slowness=1.16,
)


def test_errors_are_of_the_prediction_as_shares_of_what_was_measured() -> None:
    assert CHECKED.error == pytest.approx(0.1)
    assert CHECKED.error_at_pace == pytest.approx(-0.05)
    row = table([CHECKED]).splitlines()[-1]
    assert row == (
        "| 256 in, 64 out | 400, 60 | 3 (2.8 to 3.2) | 3.3 (3 to 3.5) | +10.0% "
        "| 2.85 (2.7 to 3) | -5.0% | 1.16 |"
    )


def test_the_record_is_json() -> None:
    record = msgspec.json.decode(msgspec.json.encode(_as_record(CHECKED)))
    assert record["measured"] == {"value": 3.0, "low": 2.8, "high": 3.2}
    assert record["target"] == {"ttft_ms": 400.0, "tpot_ms": 60.0}


def test_targets_follow_what_requests_get_alone() -> None:
    alone = Round((*[RequestLatency(100.2, 20.1)] * 9, RequestLatency(100.2, None), None), 1.0)
    assert target_of(alone) == LatencyTarget(ttft_ms=401.0, tpot_ms=51.0)
