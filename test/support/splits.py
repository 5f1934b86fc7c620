"""All ways to split layers, for searches to be held against."""

from collections.abc import Iterator
from itertools import combinations, pairwise


def all_splits(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Each stage has one layer or more."""
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *cuts, num_layers)))
