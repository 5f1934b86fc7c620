"""DynaPipe's own rule: how many layers leave the last stage, from the times of one layer and of
sampling (NeurIPS 2025; the formula and its check are in the paper's planner section).

`PlannerArgs.rule` selects it; the simulator compares it with the planner's balance.
"""

from collections.abc import Sequence

from sgl_pipeline.layer_partition import even_layer_counts


def delta_ms(tail_ms: float, layer_ms: float, removed: int, num_stages: int) -> float:
    """`|T_sample - k T_layer - (k / m) T_layer|` with `m = min(k, stages - 1)`: the last stage's
    remaining surplus (or deficit) over the others when `removed` of its layers are theirs."""
    receivers = min(removed, num_stages - 1)
    received = removed / receivers if receivers else 0.0
    return abs(tail_ms - (removed + received) * layer_ms)


def best_removal(
    tail_ms: float, layer_ms: float, num_stages: int, most_removed: int, least_removed: int = 0
) -> int:
    """The number of layers to take off the last stage that leaves the least `delta_ms`; of two
    equal numbers the smaller."""
    candidates = range(least_removed, most_removed + 1)
    return min(candidates, key=lambda k: delta_ms(tail_ms, layer_ms, k, num_stages))


def without_last_layers(layer_counts: Sequence[int], removed: int) -> tuple[int, ...]:
    """`layer_counts` with `removed` layers of the last stage spread evenly over the others: each
    goes to the stage with the fewest, of several to the nearest to the last.

    The last stage keeps at least one.
    """
    counts = list(layer_counts)
    assert 0 <= removed < counts[-1] and len(counts) > 1
    for _ in range(removed):
        counts[-1] -= 1
        fewest = min(counts[:-1])
        receiver = max(stage for stage, count in enumerate(counts[:-1]) if count == fewest)
        counts[receiver] += 1
    return tuple(counts)


def even_split_less(num_layers: int, num_stages: int, removed: int) -> tuple[int, ...]:
    """An even split without `removed` layers of its last stage."""
    return without_last_layers(even_layer_counts(num_layers, num_stages), removed)
