"""Memory over time: what counts as flat."""

import psutil
import pytest

from benchmark.robustness.process_memory import MemorySeries


def test_growth_is_counted_from_the_end_of_the_warm_up() -> None:
    series = MemorySeries({"stage 0": [(0, 100.0), (30, 500.0), (60, 520.0), (90, 540.0)]})
    growth = series.growth(warm_up_s=30)["stage 0"]
    assert (growth.after_warm_up_mib, growth.last_mib) == (500.0, 540.0)
    assert growth.slope_mib_per_minute == pytest.approx(40.0)
    assert growth.is_flat(0.08)
    assert not growth.is_flat(0.079)


def test_a_process_is_sampled_under_its_name() -> None:
    series = MemorySeries()
    series.sample(psutil.Process(), 1.0)
    ((elapsed_s, resident_mib),) = series.samples["main"]
    assert elapsed_s == 1.0
    assert resident_mib > 64
