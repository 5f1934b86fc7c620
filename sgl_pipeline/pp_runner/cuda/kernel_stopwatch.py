"""Times the kernels of calls on a GPU apart from their launching, which graphs and steps in flight
hide.

The GPU is kept busy while the host launches a whole round of calls, so that their kernels then
follow each other without a gap; events between them give the times. The order of work is tested on
a CPU with a simulated device.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol, Self, TypeVar

import torch

logger = logging.getLogger(__name__)

_ROUNDS = 7
# The GPU is kept busy for longer, up to this many times as long, if the host did not keep ahead.
_MOST_OCCUPATIONS = 16
# Read before each call: more than the cache of any GPU holds.
_CACHE_BYTES = 256 * 2**20
_SQUARE_SIDE = 4096

Name = TypeVar("Name")


class Moment(Protocol):
    """A place in the work that a device has queued."""

    def has_passed(self) -> bool:
        """True if the device has reached this point. Does not wait."""

    def ms_until(self, later: Self) -> float:
        """Milliseconds between two moments that have passed."""


class Timeline(Protocol):
    """The work that a device has queued; tests simulate one."""

    def occupy(self, times: int) -> None:
        """Queues `times` as much work as takes the device a millisecond or more."""

    def empty_caches(self) -> None:
        """Queues the reading of more memory than its caches hold."""

    def mark(self) -> Moment: ...

    def wait(self) -> None:
        """Returns when all queued work is done."""


class KernelStopwatch:
    """The `Stopwatch` of a GPU. A call's time is that of its kernels, from the first one's start to
    the last one's end, unless it waits for the GPU itself."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._occupations = 1

    def least_ms(self, calls: Mapping[Name, Callable[[], object]]) -> dict[Name, float]:
        """See `Stopwatch`."""
        for call in calls.values():
            call()  # compiles and loads its kernels
        self._timeline.wait()
        rounds = [self._round_ms(calls) for _ in range(_ROUNDS)]
        return {name: min(times_ms[name] for times_ms in rounds) for name in calls}

    def _round_ms(self, calls: Mapping[Name, Callable[[], object]]) -> dict[Name, float]:
        while True:
            moments, host_was_ahead = self._queue_round(calls)
            self._timeline.wait()
            if host_was_ahead or self._occupations >= _MOST_OCCUPATIONS:
                break
            self._occupations *= 2
        if not host_was_ahead:
            logger.info("the layer costs have the launching of kernels in them")
        return {name: start.ms_until(end) for name, (start, end) in moments.items()}

    def _queue_round(
        self, calls: Mapping[Name, Callable[[], object]]
    ) -> tuple[dict[Name, tuple[Moment, Moment]], bool]:
        """The start and the end of each call, and whether none had begun when all were queued."""
        timeline = self._timeline
        timeline.occupy(self._occupations)
        first = timeline.mark()
        moments = {}
        for name, call in calls.items():
            timeline.empty_caches()
            start = timeline.mark()
            call()
            moments[name] = (start, timeline.mark())
        return moments, not first.has_passed()


class CudaTimeline:
    """The current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._others = torch.ones(_CACHE_BYTES // 4, device=device)
        self._square = self._others[: _SQUARE_SIDE**2].view(_SQUARE_SIDE, _SQUARE_SIDE)
        self._product = torch.empty_like(self._square)

    def occupy(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._square, self._square, out=self._product)

    def empty_caches(self) -> None:
        self._others.sum()

    def mark(self) -> "CudaMoment":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return CudaMoment(event)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


class CudaMoment:
    """The `Moment` of a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def has_passed(self) -> bool:
        return bool(self._event.query())

    def ms_until(self, later: Self) -> float:
        return float(self._event.elapsed_time(later._event))
