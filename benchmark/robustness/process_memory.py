"""Resident memory of a server's processes over time, and whether it stays flat.

Used by `soak.py`. What counts as flat is decided here, so that a report can be checked by reading
one function.
"""

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from benchmark.support.process_kinds import process_kind

_SMALLEST_MIB = 64.0  # below are the janitor and Python's resource tracker


@dataclass(frozen=True, slots=True)
class Growth:
    """From the end of the warm-up to the end of the load; MiB, and the fitted MiB a minute."""

    after_warm_up_mib: float
    last_mib: float
    slope_mib_per_minute: float

    def is_flat(self, most_growth: float) -> bool:
        """True if the memory grew by at most that share since the warm-up."""
        return self.last_mib <= self.after_warm_up_mib * (1 + most_growth)


@dataclass(slots=True)
class MemorySeries:
    """Samples of every process by its name: (seconds since the start, resident MiB)."""

    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def sample(self, server: psutil.Process, elapsed_s: float) -> None:
        """Adds one sample of `server` and its descendants."""
        for process in (server, *server.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                resident_mib = process.memory_info().rss / 2**20
                if resident_mib >= _SMALLEST_MIB:
                    name = _name(process, server)
                    self.samples.setdefault(name, []).append((elapsed_s, resident_mib))

    def growth(self, warm_up_s: float) -> dict[str, Growth]:
        """The growth of every process with at least two samples after the warm-up."""
        return {
            name: _growth([sample for sample in samples if sample[0] >= warm_up_s])
            for name, samples in self.samples.items()
            if len([sample for sample in samples if sample[0] >= warm_up_s]) > 1
        }


def _growth(samples: Sequence[tuple[float, float]]) -> Growth:
    times, sizes = zip(*samples, strict=True)
    slope = statistics.linear_regression(times, sizes).slope
    return Growth(sizes[0], sizes[-1], slope * 60)


def _name(process: psutil.Process, server: psutil.Process) -> str:
    if process.pid == server.pid:
        return "main"
    kind = process_kind(process.cmdline(), process.pid)
    is_alone = kind.startswith("stage ") or kind in ("scheduler", "detokenizer")
    return kind if is_alone else f"{kind} ({process.pid})"
