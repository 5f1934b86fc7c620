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
    """A stage's time: `speed * (its layers' + extra_ms)`."""

    speed: float
    extra_ms: float


def can_stay_below(
    slowest_ms: float, ends_ms: Sequence[float], stages: Sequence[StageTerms]
) -> bool:
    """True if a split may keep all stages at `slowest_ms` or less, without limits on layers: each
    takes as many as it can, in order. Exact if all layers take the same time; never False if there
    is such a split.

    Args:
        ends_ms: of n layers the n + 1 sums of their times before each boundary.
    """
    end, last = 0, len(ends_ms) - 1
    shortest_ms = min(high - low for low, high in pairwise(ends_ms))
    rounding_ms = 1e-9 * ends_ms[-1] / last
    for stage in stages:
        room_ms = slowest_ms / stage.speed - stage.extra_ms + rounding_ms
        if room_ms < shortest_ms:
            return False
        end = bisect_right(ends_ms, ends_ms[end] + room_ms) - 1
    return end == last


class SplitSearch:
    """The splits that can follow `layer_counts`, and the layers that each moves.

    Args:
        layer_counts: of the present split.
        max_layers: the most that each stage may hold at any moment of the move, layers that it
            loses and layers that it gets together; None: any number.
    """

    def __init__(
        self,
        layer_counts: Sequence[int],
        max_layers: Sequence[int] | None = None,
    ) -> None:
        self._num_layers = sum(layer_counts)
        self._num_stages = len(layer_counts)
        bounds = np.arange(self._num_layers + 1)
        start, end = bounds[:, None], bounds[None, :]
        ends = list(accumulate(layer_counts))
        # By stage and run of layers [start, end): whether the stage may have it, and the number of
        # its layers that the stage does not have now.
        self._allowed: list[npt.NDArray[np.bool_]] = []
        self._arriving: list[Matrix] = []
        for stage, (old_end, count) in enumerate(zip(ends, layer_counts, strict=True)):
            kept = np.minimum(end, old_end) - np.maximum(start, old_end - count)
            arriving = (end - start) - np.maximum(kept, 0)
            allowed = end > start
            if max_layers is not None:
                allowed = allowed & (count + arriving <= max_layers[stage])
            self._allowed.append(allowed)
            self._arriving.append(arriving.astype(np.float64))

    def best(
        self, ends_ms: Sequence[float], stages: Sequence[StageTerms]
    ) -> tuple[int, ...] | None:
        """The split, of at least one layer a stage, with the fastest slowest stage; of splits
        within `SLACK` of it the one that moves the fewest layers, then the most even one. None if
        no split is within the limits.

        Args:
            ends_ms: as of `can_stay_below`.
        """
        sums_ms = np.asarray(ends_ms, dtype=np.float64)
        of_runs = sums_ms[None, :] - sums_ms[:, None]
        times = [
            np.where(allowed, term.speed * (of_runs + term.extra_ms), np.inf)
            for allowed, term in zip(self._allowed, stages, strict=True)
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

    def is_allowed(self, layer_counts: Sequence[int]) -> bool:
        """True if every stage may hold its layers of that split beside its present ones."""
        ends = [0, *accumulate(layer_counts)]
        return all(
            bool(allowed[start, end])
            for allowed, start, end in zip(self._allowed, ends, ends[1:], strict=False)
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
