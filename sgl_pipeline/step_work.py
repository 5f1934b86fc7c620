"""The work of a step: the five numbers that its time depends on.

`Microbatch.work` of a step that was decided, `StepRecord.work` of one that has ended; the predictor
in `migration/` turns it into milliseconds.
"""

from typing import NamedTuple, Protocol


class StepWork(NamedTuple):
    """`tokens` are all rows of the step, `decodes` the rows that continue an output, `samples` the
    rows that go through the head.

    Attended tokens are counted separately: a decode reads keys that no other row shares, the rows
    of a prompt read theirs together. On one core of an AMD EPYC the former took ten times as long a
    pair of row and token (0.27 B model, bf16: 0.11 against 0.011 us a layer).
    """

    tokens: int
    decodes: int
    decode_attended_tokens: int
    prefill_attended_tokens: int
    samples: int


class StepTimes(Protocol):
    """Predicts step times by present knowledge. Never changes."""

    def step_ms(self, work: StepWork) -> float:
        """Predicted milliseconds of the stage that takes longest. More work never takes less."""


def attended_tokens(start: int, end: int) -> int:
    """Pairs of a row and a token that it attends to, for the rows of positions [start, end)."""
    return (end - start) * (start + end + 1) // 2
