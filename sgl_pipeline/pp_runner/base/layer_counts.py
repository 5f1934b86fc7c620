"""The most layers of each kind that a stage may hold at once, where layers move."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class MostLayers(NamedTuple):
    """The most layers that a stage may hold at once; not all of them at the same time."""

    with_pages: int
    with_states: int


def most_layers(have_states: Sequence[bool], num_held: int) -> MostLayers:
    """Most layers of each kind among the `num_held` that a stage holds, in any plan or between two.

    Args:
        have_states: of each layer of the model; the others have pages.
    """
    have_pages = [not one for one in have_states]
    return MostLayers(_most(have_pages, num_held), _most(have_states, num_held))


def _most(is_of_kind: Sequence[bool], num_held: int) -> int:
    """The layers of a plan are one run, and while layers move those of the next plan another."""
    sums = [0, *accumulate(map(int, is_of_kind))]
    num_layers = len(is_of_kind)
    num_held = min(num_held, num_layers)
    of_run = [
        max(sums[start + length] - sums[start] for start in range(num_layers - length + 1))
        for length in range(num_held + 1)
    ]
    most = max(of_run[length] + of_run[num_held - length] for length in range(num_held + 1))
    return min(most, sums[-1])
