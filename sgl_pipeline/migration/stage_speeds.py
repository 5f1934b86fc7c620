"""Each stage's current speed factor: the measured over the predicted time of its steps.

It is computed from the stages' own timings. A factor is the median over blocks of steps, so a
slower stage shows within about forty steps, and a step that something else disturbed not at all.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

BLOCK_STEPS = 8
NUM_BLOCKS = 9
# Stages whose factors differ by less from their median count as equal.
TOLERANCE = 0.05


class StageSpeeds:
    """`factors[s]` multiplies the predictions for stage `s`; 1.0 each until a block is full. Holds
    `NUM_BLOCKS` numbers a stage."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.factors = (1.0,) * num_stages
        self._steps = 0
        self._measured_ms = [0.0] * num_stages
        self._predicted_ms = [0.0] * num_stages
        self.forget()

    def forget(self) -> None:
        """Drops the predictions so far; the factors stay until a new block is full."""
        self._blocks: list[deque[float]] = [
            deque(maxlen=NUM_BLOCKS) for _ in range(self._num_stages)
        ]
        self._start_block()

    def note(self, measured_ms: Sequence[float], predicted_ms: Sequence[float]) -> None:
        """One step, stage by stage."""
        self._measured_ms = [a + b for a, b in zip(self._measured_ms, measured_ms, strict=True)]
        self._predicted_ms = [a + b for a, b in zip(self._predicted_ms, predicted_ms, strict=True)]
        self._steps += 1
        if self._steps == BLOCK_STEPS:
            self._end_block()

    def _start_block(self) -> None:
        self._steps = 0
        self._measured_ms = [0.0] * self._num_stages
        self._predicted_ms = [0.0] * self._num_stages

    def _end_block(self) -> None:
        pairs = zip(self._blocks, self._measured_ms, self._predicted_ms, strict=True)
        for blocks, measured_ms, predicted_ms in pairs:
            if predicted_ms > 0.0 and measured_ms > 0.0:
                blocks.append(measured_ms / predicted_ms)
        factors = [median(blocks) if blocks else 1.0 for blocks in self._blocks]
        typical = median(factors)
        self.factors = tuple(
            typical if abs(factor - typical) <= TOLERANCE * typical else factor
            for factor in factors
        )
        self._start_block()
