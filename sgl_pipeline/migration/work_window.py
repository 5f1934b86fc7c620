"""The last steps' part times and their sums, and proposals that have to last.

Each step costs one addition and one subtraction.
"""

from collections import deque
from operator import add, sub
from typing import Generic, TypeVar

from sgl_pipeline.migration.predictor import PartTimes

Proposed = TypeVar("Proposed")
# Sums to which numbers are added and subtracted for ever drift; they are recomputed this often.
_FRESH_SUM_STEPS = 4096


class WorkWindow:
    """The part times of the newest `num_steps` steps."""

    def __init__(self, num_steps: int) -> None:
        self._parts: deque[PartTimes] = deque(maxlen=num_steps)
        self._num_steps = num_steps
        self._sums: tuple[float, ...] = ()
        self._age = 0

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def is_full(self) -> bool:
        return len(self._parts) == self._num_steps

    def add(self, parts: PartTimes) -> None:
        numbers = _numbers(parts)
        sums = self._sums or (0.0,) * len(numbers)
        if len(self._parts) == self._num_steps:
            sums = tuple(map(sub, sums, _numbers(self._parts[0])))
        self._parts.append(parts)
        self._age += 1
        if self._age % _FRESH_SUM_STEPS == 0:
            columns = zip(*map(_numbers, self._parts), strict=True)
            self._sums = tuple(sum(column) for column in columns)
            return
        self._sums = tuple(map(add, sums, numbers))

    def mean(self) -> PartTimes:
        """The mean of the present steps; there must be at least one."""
        count = len(self._parts)
        layer_ms, embedding_ms, tail_ms, *windows_ms = (one / count for one in self._sums)
        return PartTimes(layer_ms, embedding_ms, max(0.0, tail_ms), tuple(windows_ms))

    def clear(self) -> None:
        self._parts.clear()
        self._sums = ()


def _numbers(parts: PartTimes) -> tuple[float, ...]:
    return *parts[:3], *parts.windows_ms


class Unanimity(Generic[Proposed]):
    """The proposal of all of the last `num_positions` positions, if they agree."""

    def __init__(self, num_positions: int) -> None:
        self._needed = num_positions
        self._proposed: Proposed | None = None
        self._count = 0

    def note(self, proposed: Proposed) -> Proposed | None:
        """The agreed proposal, this position's included; None while there is none."""
        if proposed != self._proposed:
            self._proposed, self._count = proposed, 0
        self._count += 1
        return proposed if self._count >= self._needed else None

    def clear(self) -> None:
        self._proposed, self._count = None, 0
