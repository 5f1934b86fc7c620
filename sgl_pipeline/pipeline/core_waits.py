"""The time in which a silent worker had no core to run on: other processes had them, and it does
not hang.

This time does not count as silence. Reads no clock.
"""

from collections.abc import Callable, Mapping

# Seconds for which each thread of a worker has waited for a core since its start; empty if unknown.
ThreadWaits = Mapping[int, float]


class CoreWaits:
    """Args:
    waits_s: the waiting times of a worker's threads now, by thread.
    """

    def __init__(self, waits_s: Callable[[int], ThreadWaits]) -> None:
        self._waits_s = waits_s
        self._before: dict[int, ThreadWaits] = {}

    def begin(self, worker: int) -> None:
        """`since_s` counts the worker's waits from now on."""
        self._before[worker] = self._waits_s(worker)

    def since_s(self, worker: int) -> float:
        """Seconds for which the thread that waited longest has waited for a core; a step waits for
        all threads. From the worker's start where `begin` was not called."""
        before = self._before.get(worker, {})
        now = self._waits_s(worker)
        return max((waited_s - before.get(one, 0.0) for one, waited_s in now.items()), default=0.0)

    def forget(self, worker: int) -> None:
        self._before.pop(worker, None)


def no_waits(worker: int) -> ThreadWaits:
    """The waits of no worker are known."""
    return {}
