"""Measured times between and beyond the points at which they were measured.

Linear between neighbors in every axis, the lowest value below the first
point (a kernel never costs less than its launch), and beyond the last one the slope over the upper
half of the axis: that between the last two points, where they are close, is noise.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class Grid:
    """Values at every combination of the axes' points.

    `axes[i]` are the sorted points of coordinate i, `values` maps a point to its value.
    """

    axes: tuple[tuple[float, ...], ...]
    values: Mapping[tuple[float, ...], float]

    @classmethod
    def of(cls, points: Iterable[tuple[tuple[float, ...], float]]) -> "Grid":
        """The grid of pairs (coordinates, value). Raises ValueError where a combination lacks."""
        values = dict(points)
        axes = tuple(tuple(sorted(set(axis))) for axis in zip(*values, strict=True))
        missing = [point for point in product(*axes) if point not in values]
        if missing:
            raise ValueError(f"{len(missing)} points of the grid are missing, first {missing[0]}")
        return cls(axes, values)

    def at(self, *coordinates: float) -> float:
        """The value at `coordinates`, one for each axis."""
        total = 0.0
        corners = [
            _neighbors(axis, place) for axis, place in zip(self.axes, coordinates, strict=True)
        ]
        for corner in product(*corners):
            weight = 1.0
            for _, share in corner:
                weight *= share
            if weight:
                total += weight * self.values[tuple(point for point, _ in corner)]
        return total


def _neighbors(axis: tuple[float, ...], place: float) -> tuple[tuple[float, float], ...]:
    """The two points around `place`, or beyond all of them the last one and the one nearest to half
    of it from below, and the weight of each."""
    if place <= axis[0] or len(axis) == 1:
        return ((axis[0], 1.0),)
    high = axis[-1]
    if place > high:
        low = axis[max(0, bisect_right(axis[:-1], 0.5 * high) - 1)]
    else:
        upper = min(bisect_right(axis, place), len(axis) - 1)
        low, high = axis[upper - 1], axis[upper]
    share = (place - low) / (high - low)
    return ((low, 1.0 - share), (high, share))
