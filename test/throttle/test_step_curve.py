"""The curve of step times over decodes, on a worked example."""

import pytest

from sgl_pipeline.throttle.step_curve import CURVE_DECODES, step_curve
from test.throttle.test_time_throttle import Times, load


def test_it_has_the_times_of_steps_of_decodes_of_mean_length() -> None:
    """10 ms, 0.1 for each row and 0.3 for the 300 tokens that it attends to."""
    times = Times(attended_ms=1.0)
    curve = step_curve(load(times, running_decodes=4, decode_attended_tokens=1200))
    assert len(curve) == len(CURVE_DECODES)
    for decodes, ms in zip(CURVE_DECODES, curve, strict=True):
        assert ms == pytest.approx(10 + 0.4 * decodes)


def test_it_is_there_while_nothing_decodes_and_empty_while_nothing_is_known() -> None:
    assert step_curve(load(Times(), decode_attended_tokens=0))[0] == pytest.approx(10.1)
    assert step_curve(load(None)) == ()
