"""Predicts a step's time in each part of the model, in about a microsecond.

Pure; the numbers come from a `StepCosts`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from sgl_pipeline.costs.step_costs import RowCost, StepCosts
from sgl_pipeline.costs.windows import windowed_work
from sgl_pipeline.step_work import StepWork


class PartTimes(NamedTuple):
    """Milliseconds of one step: of a layer of weight 1, of the embedding (only the first stage has
    it) and of the tail (only the last stage has it); `windows_ms` of a layer of weight 1 with each
    of the predictor's `windows`."""

    layer_ms: float
    embedding_ms: float
    tail_ms: float
    windows_ms: tuple[float, ...] = ()

    def layers_ms(self, weights: Sequence[float]) -> float:
        """Time of layers that weigh so much: those without a window, then those of each."""
        if not self.windows_ms:
            return weights[0] * self.layer_ms
        times_ms = (self.layer_ms, *self.windows_ms)
        return sum(weight * one_ms for weight, one_ms in zip(weights, times_ms, strict=True))


class StepPredictor:
    """The times of any step on one machine, by its `StepCosts`."""

    __slots__ = (
        "_decode_attended_ms",
        "_decode_ms",
        "_embedding",
        "_layer",
        "_prefill_attended_ms",
        "_tail",
        "_weight_ends",
        "costs",
        "windows",
    )

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        own_windows = costs.layer_windows or (None,) * len(costs.layer_weights)
        self.windows = tuple(sorted({one for one in own_windows if one is not None}))
        # Difference of entries e and p: the weight of layers [p, e), without a window and with each
        # of the windows.
        layers = [*zip(costs.layer_weights, own_windows, strict=True)]
        self._weight_ends = tuple(
            (0.0, *accumulate(weight * (own == window) for weight, own in layers))
            for window in (None, *self.windows)
        )
        self._layer = _segments(costs.layer.rows)
        self._embedding = _segments(costs.embedding)
        self._tail = _segments(costs.tail)
        self._decode_ms = costs.layer.decode_ms
        self._decode_attended_ms = costs.layer.decode_attended_ms
        self._prefill_attended_ms = costs.layer.prefill_attended_ms

    def parts_ms(self, work: StepWork) -> PartTimes:
        """Time of each part in a step of this work."""
        tokens, decodes, by_decodes, by_prefill, samples = work
        # Written out: three calls would take as long again.
        rows, starts_ms, slopes_ms = self._layer
        place = bisect_right(rows, tokens)
        layer_ms = (
            starts_ms[place]
            + slopes_ms[place] * tokens
            + self._decode_ms * decodes
            + self._decode_attended_ms * by_decodes
            + self._prefill_attended_ms * by_prefill
        )
        windows_ms: tuple[float, ...] = ()
        if self.windows:
            windows_ms = tuple(
                layer_ms - self._beyond_ms(work, windowed_work(work, window))
                for window in self.windows
            )
        rows, starts_ms, slopes_ms = self._embedding
        place = bisect_right(rows, tokens)
        embedding_ms = starts_ms[place] + slopes_ms[place] * tokens
        if not samples:
            return PartTimes(layer_ms, embedding_ms, 0.0, windows_ms)
        rows, starts_ms, slopes_ms = self._tail
        place = bisect_right(rows, samples)
        tail_ms = starts_ms[place] + slopes_ms[place] * samples
        return PartTimes(layer_ms, embedding_ms, tail_ms, windows_ms)

    def layer_ends_ms(self, parts: PartTimes) -> tuple[float, ...]:
        """The n + 1 sums of the times of n layers before each boundary."""
        return tuple(parts.layers_ms(ends) for ends in zip(*self._weight_ends, strict=True))

    def stage_weights(self, layer_counts: Sequence[int]) -> tuple[tuple[float, ...], ...]:
        """The weights of each stage's layers, as `PartTimes.layers_ms` takes them."""
        ends = list(accumulate(layer_counts))
        return tuple(
            tuple(total[end] - total[end - count] for total in self._weight_ends)
            for end, count in zip(ends, layer_counts, strict=True)
        )

    def stage_times_ms(
        self, parts: PartTimes, layer_counts: Sequence[int], speeds: Sequence[float] = ()
    ) -> tuple[float, ...]:
        """Time of each stage of a split, from a step's part times.

        Args:
            speeds: factors of the stages' times; empty: all are 1.
        """
        times = weighted_times_ms(parts, self.stage_weights(layer_counts))
        if speeds:
            times = [one * speed for one, speed in zip(times, speeds, strict=True)]
        return tuple(times)

    def _beyond_ms(self, work: StepWork, seen: StepWork) -> float:
        """The time that a layer saves where a window hides all of `work` except `seen`."""
        by_decodes = work.decode_attended_tokens - seen.decode_attended_tokens
        by_prefill = work.prefill_attended_tokens - seen.prefill_attended_tokens
        return self._decode_attended_ms * by_decodes + self._prefill_attended_ms * by_prefill


def weighted_times_ms(parts: PartTimes, weights: Sequence[Sequence[float]]) -> list[float]:
    """Time of each stage, from `StepPredictor.stage_weights`."""
    times = [parts.layers_ms(own) for own in weights]
    times[0] += parts.embedding_ms
    times[-1] += parts.tail_ms
    return times


class SlowestStage:
    """A `StepTimes`: a step's time on the slowest stage of a split.

    Args:
        speeds: factors of the stages' times.
    """

    __slots__ = ("_first", "_last", "_middle", "_predictor", "_stages")

    def __init__(
        self, predictor: StepPredictor, layer_counts: Sequence[int], speeds: Sequence[float]
    ) -> None:
        weights = predictor.stage_weights(layer_counts)
        self._predictor = predictor
        self._stages = tuple(zip(speeds, weights, strict=True))
        # Of layers without a window, one number says which stage's take longest in any step.
        layers = [speed * own[0] for speed, own in self._stages]
        self._middle = max(layers)  # the first and the last stage take no less than their layers
        self._first = (layers[0], speeds[0])
        self._last = (layers[-1], speeds[-1], speeds[-1] if len(layers) == 1 else 0.0)

    def step_ms(self, work: StepWork) -> float:
        parts = self._predictor.parts_ms(work)
        if parts.windows_ms:
            times = weighted_times_ms(parts, [weights for _, weights in self._stages])
            return max(speed * time for (speed, _), time in zip(self._stages, times, strict=True))
        layer_ms, embedding_ms, tail_ms, _ = parts
        weight, speed = self._first
        first_ms = weight * layer_ms + speed * embedding_ms
        weight, speed, embedding_speed = self._last
        last_ms = weight * layer_ms + speed * tail_ms + embedding_speed * embedding_ms
        return max(self._middle * layer_ms, first_ms, last_ms)


def _segments(cost: RowCost) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """The knots, and for the rows up to each knot and beyond the last the straight line's value at
    0 rows and its slope; `bisect_right(knots, rows)` is the place of the line for `rows`."""
    starts_ms, slopes_ms = [cost.times_ms[0]], [0.0]
    points = list(zip(cost.rows, cost.times_ms, strict=True))
    for (low, low_ms), (high, high_ms) in pairwise(points):
        slope_ms = (high_ms - low_ms) / (high - low)
        starts_ms.append(low_ms - slope_ms * low)
        slopes_ms.append(slope_ms)
    last, last_ms = points[-1]
    starts_ms.append(last_ms - cost.row_ms * last)
    slopes_ms.append(cost.row_ms)
    return cost.rows, tuple(starts_ms), tuple(slopes_ms)
