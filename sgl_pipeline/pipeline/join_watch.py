"""Finds joining workers that have been silent for too long, measured against earlier ones.

Reads no clock and ends no worker. Stages that run steps are watched by `stage_watch.py`.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from sgl_pipeline.pipeline.core_waits import CoreWaits, ThreadWaits, no_waits

# A silence may last this many times as long as the longest that has ended. Other workers may start
# at the same time, on the same cores.
PATIENCE = 5.0

# To come up and greet; to load weights, or to do anything else that it was asked for.
Task = Literal["start", "load"]


class Debt(NamedTuple):
    """A worker is busy with `task`; its last message was sent or received at `since_s`."""

    task: Task
    since_s: float


class JoinWatch:
    """Args:
    silence_s: seconds that every worker may be silent, even if others were faster.
    limit_s: the same if no worker has done this before.
    waits_s: returns the core waits of a worker's threads.
    """

    def __init__(
        self,
        silence_s: float,
        limit_s: float,
        waits_s: Callable[[int], ThreadWaits] = no_waits,
    ) -> None:
        self._silence_s = silence_s
        self._limit_s = limit_s
        self._waits = CoreWaits(waits_s)
        self._debts: dict[int, Debt] = {}
        self._longest_s: dict[Task, float] = {}

    def asked(self, worker: int, task: Task, now_s: float) -> None:
        """The worker must do this, and report when it is done."""
        self._debts[worker] = Debt(task, now_s)
        self._waits.begin(worker)

    def heard(self, worker: int, now_s: float, is_done: bool) -> None:
        """The worker has sent a message; unless it `is_done`, another will follow."""
        debt = self._debts.pop(worker, None)
        if debt is None:
            return
        silent_s = now_s - debt.since_s
        self._longest_s[debt.task] = max(silent_s, self._longest_s.get(debt.task, 0.0))
        if not is_done:
            self.asked(worker, debt.task, now_s)

    def forget(self, worker: int) -> None:
        """The worker is lost."""
        self._debts.pop(worker, None)
        self._waits.forget(worker)

    def bound_s(self, task: Task) -> float:
        """Longest silence that a worker is allowed meanwhile, in seconds."""
        longest_s = self._longest_s.get(task)
        if longest_s is None:
            return self._limit_s
        return min(self._limit_s, max(self._silence_s, PATIENCE * longest_s))

    def silent_workers(self, now_s: float) -> Iterator[tuple[int, str]]:
        """The workers that have been silent for too long, and the reason to report for each."""
        for worker, debt in self._debts.items():
            bound_s, silent_s = self.bound_s(debt.task), now_s - debt.since_s
            if silent_s <= bound_s:
                continue
            waited_s = self._waits.since_s(worker)
            if silent_s - waited_s > bound_s:
                verb = "started" if debt.task == "start" else "loaded"
                yield (
                    worker,
                    f"it was silent for {silent_s:.1f} s while it {verb}, {waited_s:.1f} s of them "
                    f"without a core, which may take {bound_s:.1f} s",
                )
