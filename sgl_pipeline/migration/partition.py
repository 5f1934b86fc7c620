"""The layer split whose slowest stage takes least, from the costs of the workers."""

from collections.abc import Callable, Sequence
from math import inf

from sgl_pipeline.costs.stage_costs import PartSizes, StageCosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.migration.cost_model import run_ms, stage_times_ms

# Whether stage `s` can hold layers [start, end), and the model's ends where these are its.
Fits = Callable[[int, int, int], bool]


def fits_in(sizes: PartSizes, memory_bytes: Sequence[int], num_tokens: int) -> Fits:
    """A `Fits`: weights and pages for `num_tokens` tokens, one page at least, go into each stage's
    memory."""
    least_pages = max(1, -(-num_tokens // sizes.page_size))
    return lambda stage, start, end: sizes.num_pages(start, end, memory_bytes[stage]) >= least_pages


def balanced_layer_counts(
    costs: Sequence[StageCosts],
    fits: Fits = lambda stage, start, end: True,
    *,
    have_states: bool = False,
) -> tuple[int, ...]:
    """The split, of at least one layer a stage that it can hold, with the fastest slowest stage; of
    several such, the most even one (the least sum of squares of the stages' times), then longer
    runs first.

    Args:
        have_states: True if state slots take memory of the stages, which the error then names.

    Raises ConfigurationError if the stages cannot hold the model in any split.
    """
    fastest = _cheapest_split(costs, max, fits)
    if fastest is None:
        slots = ", fewer state slots (--max-mamba-cache-size)" if have_states else ""
        raise ConfigurationError(
            f"the {len(costs[0].layers_ms)} layers do not fit into the memory of {len(costs)} "
            f"stages, however they are split; use more stages (--pp){slots} or fewer KV tokens "
            "(--max-total-tokens)"
        )
    slowest_ms = max(stage_times_ms(costs, fastest))

    def add_square(total: float, stage_ms: float) -> float:
        return total + stage_ms**2 if _comparable(stage_ms) <= _comparable(slowest_ms) else inf

    return _cheapest_split(costs, add_square, fits) or fastest


def _cheapest_split(
    costs: Sequence[StageCosts], add: Callable[[float, float], float], fits: Fits
) -> tuple[int, ...] | None:
    """The linear partition problem, by dynamic programming: `add(total, stage_ms)` is the cost of
    the stages up to one, when the stages before it cost `total`. None if nothing fits."""
    num_layers, num_stages = len(costs[0].layers_ms), len(costs)
    # The end of the runs so far: their cost, and their lengths.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        most = num_layers - (num_stages - 1 - stage)
        ends = range(stage + 1, most + 1) if stage < num_stages - 1 else [num_layers]
        longer = {}
        for end in ends:
            choices = [
                (_comparable(add(total, run_ms(costs, stage, start, end))), -start)
                for start, (total, _) in best.items()
                if start < end and fits(stage, start, end)
            ]
            if choices:
                cost, negative_start = min(choices)
                longer[end] = (cost, (*best[-negative_start][1], end + negative_start))
        best = longer
    return best[num_layers][1] if num_layers in best else None


def _comparable(cost: float) -> float:
    """Rounded, so that sums of the same fractions in another order are equal."""
    return round(cost, 9)
