"""Finds the layer split with the fastest slowest stage, within the number of layers that each may
hold.

To be run only if `can_stay_below` promises a gain: dynamic programming over arrays, about 0.1 ms
for 64 layers on 4 stages and 0.5 ms for 80 on 8.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Matrix: TypeAlias = npt.NDArray[np.float64]

# Splits whose slowest stage is this share from the best are as good: the one that moves the fewest
# layers is taken.
SLACK = 0.005


@dataclass(frozen=True, slots=True)
class StageTerms:
    """A stage's time: `speed * (weight of its layers * layer_ms + extra_ms)`."""

    speed: float
    extra_ms: float


def can_stay_below(
    slowest_ms: float, layer_ms: float, stages: Sequence[StageTerms], weight_ends: Sequence[float]
) -> bool:
    """True if a split may keep all stages at `slowest_ms` or less, without limits on layers: each
    stage takes as many as it can, in order. Exact if all layers weigh the same; never False if
    there is such a split."""
    end, last = 0, len(weight_ends) - 1
    lightest = min(high - low for low, high in pairwise(weight_ends))
    layer_ms = max(layer_ms, 1e-9)
    for stage in stages:
        weight = (slowest_ms / stage.speed - stage.extra_ms) / layer_ms + 1e-9
        if weight < lightest:
            return False
        end = bisect_right(weight_ends, weight_ends[end] + weight) - 1
    return end == last


class SplitSearch:
    """The splits that can follow `layer_counts`, and the layers that each moves.

    Args:
        weight_ends: of n layers the n + 1 sums of their weights before each boundary.
        layer_counts: of the present split.
        max_layers: the most that each stage may hold at any moment of the move, layers that it
            loses and layers that it gets together; None: any number.
    """

    def __init__(
        self,
        weight_ends: Sequence[float],
        layer_counts: Sequence[int],
        max_layers: Sequence[int] | None = None,
    ) -> None:
        self._num_layers = sum(layer_counts)
        self._num_stages = len(layer_counts)
        bounds = np.arange(self._num_layers + 1)
        start, end = bounds[:, None], bounds[None, :]
        weights = np.asarray(weight_ends, dtype=np.float64)
        of_runs = weights[None, :] - weights[:, None]
        ends = list(accumulate(layer_counts))
        # By stage and run of layers [start, end): its weight (infinite if the stage may not have
        # it), and the number of its layers that the stage does not have now.
        self._weights: list[Matrix] = []
        self._arriving: list[Matrix] = []
        for stage, (old_end, count) in enumerate(zip(ends, layer_counts, strict=True)):
            kept = np.minimum(end, old_end) - np.maximum(start, old_end - count)
            arriving = (end - start) - np.maximum(kept, 0)
            allowed = end > start
            if max_layers is not None:
                allowed = allowed & (count + arriving <= max_layers[stage])
            self._weights.append(np.where(allowed, of_runs, np.inf))
            self._arriving.append(arriving.astype(np.float64))

    def best(self, layer_ms: float, stages: Sequence[StageTerms]) -> tuple[int, ...] | None:
        """The split, of at least one layer a stage, with the fastest slowest stage; of splits
        within `SLACK` of it the one that moves the fewest layers, then the most even one. None if
        no split is within the limits."""
        layer_ms = max(layer_ms, 1e-9)
        times = [
            weights * (layer_ms * term.speed) + term.extra_ms * term.speed
            for weights, term in zip(self._weights, stages, strict=True)
        ]
        slowest_ms = self._least_slowest(times)
        if not np.isfinite(slowest_ms):
            return None
        limit_ms = slowest_ms * (1.0 + SLACK)
        # Less than one layer, for any times: squares decide only between equal moves.
        share = 0.5 / (self._num_stages * max(limit_ms, 1e-12) ** 2)
        costs = []
        for arriving, stage_times in zip(self._arriving, times, strict=True):
            sums = arriving + share * stage_times**2
            costs.append(np.where(stage_times <= limit_ms, sums, np.inf))
        return self._least_sum(costs)

    def moved_layers(self, layer_counts: Sequence[int]) -> int:
        """Number of layers that another stage has in that split."""
        ends = [0, *accumulate(layer_counts)]
        return int(
            sum(
                arriving[start, end]
                for arriving, start, end in zip(self._arriving, ends, ends[1:], strict=False)
            )
        )

    def is_allowed(self, layer_counts: Sequence[int]) -> bool:
        """True if every stage may hold its layers of that split beside its present ones."""
        ends = [0, *accumulate(layer_counts)]
        return all(
            bool(np.isfinite(weights[start, end]))
            for weights, start, end in zip(self._weights, ends, ends[1:], strict=False)
        )

    def _least_slowest(self, times: Sequence[Matrix]) -> float:
        slowest = times[0][0]
        for stage_times in times[1:]:
            slowest = np.maximum(slowest[:, None], stage_times).min(axis=0)
        return float(slowest[self._num_layers])

    def _least_sum(self, costs: Sequence[Matrix]) -> tuple[int, ...]:
        total = costs[0][0]
        starts = []
        for stage_costs in costs[1:]:
            sums = total[:, None] + stage_costs
            starts.append(sums.argmin(axis=0))
            total = sums.min(axis=0)
        end, counts = self._num_layers, []
        for start_of in reversed(starts):
            start = int(start_of[end])
            counts.append(end - start)
            end = start
        counts.append(end)
        return tuple(reversed(counts))
