"""Measures the processor time that other processes took while something was measured.

Used by `calibrate.py`: on a machine that is not quiet, a prediction of times cannot hold.
"""

import os
import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """At `at_s`: seconds that all processors have been busy, and those that are ours."""

    at_s: float
    busy_s: float
    ours_s: float

    @classmethod
    def now(cls, server: psutil.Process) -> "ProcessorTimes":
        """Ours are `server` with its children, and this process with those that have ended."""
        times = psutil.cpu_times()
        mine = psutil.Process().cpu_times()
        tree = [process.cpu_times() for process in (server, *server.children(recursive=True))]
        return cls(
            at_s=time.monotonic(),
            busy_s=sum(times) - times.idle - times.iowait - times.guest - times.guest_nice,
            ours_s=mine.children_user
            + mine.children_system
            + sum(one.user + one.system for one in (mine, *tree)),
        )

    def others_share(self, until: "ProcessorTimes", num_processors: int | None = None) -> float:
        """The part of all processors' time until then that was neither ours nor idle."""
        others_s = (until.busy_s - self.busy_s) - (until.ours_s - self.ours_s)
        available_s = (until.at_s - self.at_s) * (num_processors or os.cpu_count() or 1)
        return max(0.0, others_s) / available_s
