"""The last steps' part times and their sums, and proposals that have to last.

Each step costs one addition and one subtraction.
"""

from collections import deque
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
        self._sums = (0.0, 0.0, 0.0)
        self._age = 0

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def is_full(self) -> bool:
        return len(self._parts) == self._num_steps

    def add(self, parts: PartTimes) -> None:
        layer_ms, embedding_ms, tail_ms = self._sums
        if len(self._parts) == self._num_steps:
            oldest = self._parts[0]
            layer_ms -= oldest.layer_ms
            embedding_ms -= oldest.embedding_ms
            tail_ms -= oldest.tail_ms
        self._parts.append(parts)
        self._age += 1
        if self._age % _FRESH_SUM_STEPS == 0:
            layer, embedding, tail = zip(*self._parts, strict=True)
            self._sums = (sum(layer), sum(embedding), sum(tail))
            return
        self._sums = (
            layer_ms + parts.layer_ms,
            embedding_ms + parts.embedding_ms,
            tail_ms + parts.tail_ms,
        )

    def mean(self) -> PartTimes:
        """The mean of the present steps; there must be at least one."""
        count = len(self._parts)
        layer_ms, embedding_ms, tail_ms = self._sums
        return PartTimes(layer_ms / count, embedding_ms / count, max(0.0, tail_ms / count))

    def clear(self) -> None:
        self._parts.clear()
        self._sums = (0.0, 0.0, 0.0)


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
