"""The layer split whose slowest stage takes least, from the costs of the workers.

Called by the stage launcher for `--pp-layer-partition auto`. Knows only costs: whether layers fit a
stage's memory is not asked here.
"""

from collections.abc import Callable, Sequence
from math import inf

from sgl_pipeline.migration.cost_model import run_ms, stage_times_ms
from sgl_pipeline.stage_costs import StageCosts


def balanced_layer_counts(costs: Sequence[StageCosts]) -> tuple[int, ...]:
    """The split, of at least one layer a stage, whose slowest stage takes least; of several such,
    the most even one (the least sum of squares of the stages' times), then longer runs first."""
    fastest = _cheapest_split(costs, max)
    slowest_ms = max(stage_times_ms(costs, fastest))

    def add_square(total: float, stage_ms: float) -> float:
        return total + stage_ms**2 if _comparable(stage_ms) <= _comparable(slowest_ms) else inf

    return _cheapest_split(costs, add_square)


def _cheapest_split(
    costs: Sequence[StageCosts], add: Callable[[float, float], float]
) -> tuple[int, ...]:
    """The linear partition problem, by dynamic programming: `add(total, stage_ms)` is what the
    stages up to one cost together, when those before it cost `total`."""
    num_layers, num_stages = len(costs[0].layers_ms), len(costs)
    # The end of the runs so far: what they cost, and their lengths.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        most = num_layers - (num_stages - 1 - stage)
        ends = range(stage + 1, most + 1) if stage < num_stages - 1 else [num_layers]
        longer = {}
        for end in ends:
            cost, negative_start = min(
                (_comparable(add(total, run_ms(costs, stage, start, end))), -start)
                for start, (total, _) in best.items()
                if start < end
            )
            longer[end] = (cost, (*best[-negative_start][1], end + negative_start))
        best = longer
    return best[num_layers][1]


def _comparable(cost: float) -> float:
    """Rounded, so that sums of the same fractions in another order are equal."""
    return round(cost, 9)
