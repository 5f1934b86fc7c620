"""Forecasts a layer split: times, weights and pages of every stage, and the best split.

Pure arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from sgl_pipeline.costs.stage_costs import PartSizes, StageCosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.planning.devices import StageDevice
from sgl_pipeline.migration.cost_model import stage_times_ms
from sgl_pipeline.migration.partition import balanced_layer_counts, fits_in

# Share by which the slowest stage may be slower if that leaves more room for pages.
ROOM_SHARE = 0.02
_SEARCH_STEPS = 12


@dataclass(frozen=True, slots=True)
class StageForecast:
    """`num_pages` fit beside its weights; negative if these do not fit."""

    layers: range
    time_ms: float
    weight_bytes: int
    memory_bytes: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class SplitForecast:
    """`num_pages` all stages use: the fewest of any."""

    layer_counts: tuple[int, ...]
    stages: tuple[StageForecast, ...]
    page_size: int

    @property
    def num_pages(self) -> int:
        return min(stage.num_pages for stage in self.stages)

    @property
    def num_tokens(self) -> int:
        return max(0, self.num_pages) * self.page_size

    @property
    def slowest_ms(self) -> float:
        return max(stage.time_ms for stage in self.stages)


class SplitPlanner:
    """Splits of one model over given devices.

    Args:
        costs: of the measured device; `devices` have speeds relative to it.
    """

    def __init__(self, costs: StageCosts, sizes: PartSizes, devices: Sequence[StageDevice]) -> None:
        self._costs = [costs.scaled(1.0 / device.speed) for device in devices]
        self._sizes = sizes
        self._memory_bytes = [device.memory_bytes for device in devices]

    def forecast(self, layer_counts: Sequence[int]) -> SplitForecast:
        """The forecast of that split, whether it fits or not."""
        times_ms = stage_times_ms(self._costs, layer_counts)
        stages = []
        ends = list(accumulate(layer_counts))
        for stage, (end, count) in enumerate(zip(ends, layer_counts, strict=True)):
            start, memory_bytes = end - count, self._memory_bytes[stage]
            stages.append(
                StageForecast(
                    layers=range(start, end),
                    time_ms=times_ms[stage],
                    weight_bytes=self._sizes.weight_bytes(start, end),
                    memory_bytes=memory_bytes,
                    num_pages=self._sizes.num_pages(start, end, memory_bytes),
                )
            )
        return SplitForecast(tuple(layer_counts), tuple(stages), self._sizes.page_size)

    def fastest(self, num_tokens: int = 0) -> SplitForecast:
        """The split with the fastest slowest stage among those with pages for `num_tokens`.

        Raises ConfigurationError if there is none.
        """
        fits = fits_in(self._sizes, self._memory_bytes, num_tokens)
        have_states = bool(self._sizes.state_bytes)
        return self.forecast(balanced_layer_counts(self._costs, fits, have_states=have_states))

    def roomiest(self, num_tokens: int = 0) -> SplitForecast:
        """The split with about the most pages whose slowest stage is at most `ROOM_SHARE` slower
        than that of the fastest."""
        best = self.fastest(num_tokens)
        limit_ms = best.slowest_ms * (1.0 + ROOM_SHARE)
        # An upper bound: all memory is used for pages.
        fewest, most = best.num_tokens, sum(self._memory_bytes) // self._sizes.page_layer_bytes
        most *= self._sizes.page_size
        for _ in range(_SEARCH_STEPS):
            wanted = (fewest + most) // 2
            try:
                found = self.fastest(wanted)
            except ConfigurationError:
                most = wanted
                continue
            if found.slowest_ms > limit_ms:
                most = wanted
            else:
                best, fewest = found, found.num_tokens
        return best
