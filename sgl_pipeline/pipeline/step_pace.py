"""Predicts the time of the next steps from the times of recent ones.

A straight line over the tokens of a step for the slowest stage and for the
whole trip, then one factor so that the recorded steps, run again by these lines, take together as
long as they did. Computed on request; no step waits for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_pipeline.records.trace import StepRecord

# Fewer steps do not show how time grows with tokens.
MIN_STEPS = 8


@dataclass(frozen=True, slots=True)
class _Line:
    """Seconds of a step: a base, and an amount for each token. Neither is negative."""

    base_s: float
    token_s: float

    @classmethod
    def through(cls, tokens: Sequence[int], seconds: Sequence[float]) -> "_Line":
        """The least squares of both, the slope flat where that would be negative."""
        count = len(tokens)
        mean_tokens, mean_s = sum(tokens) / count, sum(seconds) / count
        spread = sum((one - mean_tokens) ** 2 for one in tokens)
        slope = 0.0
        if spread:
            pairs = zip(tokens, seconds, strict=True)
            slope = sum((one - mean_tokens) * (s - mean_s) for one, s in pairs) / spread
        slope = min(max(slope, 0.0), mean_s / mean_tokens)
        return cls(mean_s - slope * mean_tokens, slope)

    def seconds(self, tokens: int) -> float:
        return self.base_s + self.token_s * tokens


@dataclass(frozen=True, slots=True)
class StepPace:
    """`slowest` is the slowest stage's time for a step, `trip` the time of a step that waits for no
    other. `num_steps` were measured."""

    slowest: _Line
    trip: _Line
    factor: float
    num_steps: int

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> "StepPace | None":
        """The pace of consecutive steps of one plan; None for fewer than MIN_STEPS."""
        if len(records) < MIN_STEPS:
            return None
        tokens = [record.num_tokens for record in records]
        stages_s = [[stage.compute_ms * 1e-3 for stage in one.stages] for one in records]
        # Time beyond the stages' work: the least of all, because other steps had to wait on their
        # way.
        outside_s = min(
            record.finished_s - record.scheduled_s - sum(stages)
            for record, stages in zip(records, stages_s, strict=True)
        )
        slowest = _Line.through(tokens, [max(stages) for stages in stages_s])
        trip = _Line.through(tokens, [sum(stages) + max(0.0, outside_s) for stages in stages_s])
        pace = cls(slowest, trip, 1.0, len(records))
        return cls(slowest, trip, pace._factor_of(records, tokens), len(records))

    def ends_s(self, scheduled_s: float, before_s: float, tokens: int) -> float:
        """End of a step that is decided at `scheduled_s` behind one that ends at `before_s`."""
        behind_s = before_s + self.factor * self.slowest.seconds(tokens)
        return max(behind_s, scheduled_s + self.factor * self.trip.seconds(tokens))

    def round_s(self, num_steps: int, tokens: int) -> float:
        """Seconds that this many steps in flight, of this many tokens each, take to go once
        around."""
        around_s = num_steps * self.slowest.seconds(tokens)
        return self.factor * max(around_s, self.trip.seconds(tokens))

    def _factor_of(self, records: Sequence[StepRecord], tokens: Sequence[int]) -> float:
        """The ratio of the recorded steps' time to the lines' prediction, both without idle
        time."""
        measured_s = predicted_s = 0.0
        for before, record, carried in zip(records, records[1:], tokens[1:], strict=False):
            began_s = max(before.finished_s, record.scheduled_s)
            measured_s += record.finished_s - began_s
            predicted_s += self.ends_s(record.scheduled_s, before.finished_s, carried) - began_s
        return measured_s / predicted_s if predicted_s > 0.0 and measured_s > 0.0 else 1.0
