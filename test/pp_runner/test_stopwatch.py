"""The stopwatch of a CPU, with a clock that the calls turn."""

from collections.abc import Callable

import pytest

from sgl_pipeline.pp_runner.stopwatch import HostStopwatch


class HandClock:
    """Stands still but for what calls take."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.order: list[str] = []

    def call(self, name: str, durations_ms: list[float]) -> Callable[[], None]:
        """Takes the durations one after the other, the last one for ever."""
        left = iter(durations_ms)

        def call() -> None:
            self.order.append(name)
            self.seconds += next(left, durations_ms[-1]) * 1e-3

        return call


def test_calls_take_turns_and_neither_the_first_nor_a_disturbed_one_counts() -> None:
    clock = HandClock()
    calls = {
        "layer": clock.call("layer", [0.5, 9.0, 3.0, 4.0]),
        "head": clock.call("head", [70.0, 2.0, 90.0]),
    }
    found = HostStopwatch(lambda: clock.seconds).least_ms(calls)
    assert found == {"layer": pytest.approx(3.0), "head": pytest.approx(2.0)}
    rounds = len(clock.order) // 2
    assert clock.order == ["layer", "head"] * rounds
    assert 4 <= rounds <= 8
