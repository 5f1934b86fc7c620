"""Times calls on a CPU, in turns; `cuda/kernel_stopwatch.py` times kernels on a GPU."""

import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch

# Read before each call: a stage's other layers would have put this one's weights out of the caches.
_CACHE_BYTES = 64 * 2**20
_MOST_ROUNDS, _FEWEST_ROUNDS = 7, 3
_TIME_LIMIT_S = 0.3

Name = TypeVar("Name")


class Stopwatch(Protocol):
    """Times several calls fairly."""

    def least_ms(self, calls: Mapping[Name, Callable[[], object]]) -> dict[Name, float]:
        """The least time of each call in milliseconds, as disturbances only add to it. The calls
        take turns."""


class HostStopwatch:
    """The `Stopwatch` of a CPU. The first round is not counted.

    Args:
        clock: seconds since any fixed moment.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def least_ms(self, calls: Mapping[Name, Callable[[], object]]) -> dict[Name, float]:
        """See `Stopwatch`. Takes about 0.3 s, or three rounds if they take longer."""
        others = torch.ones(_CACHE_BYTES // 4)
        times_ms: dict[Name, list[float]] = {name: [] for name in calls}
        started_s = time.perf_counter()
        for number in range(_MOST_ROUNDS + 1):
            if number > _FEWEST_ROUNDS and time.perf_counter() - started_s > _TIME_LIMIT_S:
                break
            for name, call in calls.items():
                others.sum()
                start_s = self._clock()
                call()
                if number > 0:
                    times_ms[name].append((self._clock() - start_s) * 1e3)
        return {name: min(times) for name, times in times_ms.items()}
