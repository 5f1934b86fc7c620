"""The layers of a page's objects: runs of layers, one object behind the other.

Stages of one split write the objects, stages of another one read parts of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated

import msgspec

# The first layer of each object, ascending from 0; empty: there is an object for each layer.
Cuts = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


def are_cuts(cuts: Cuts, num_layers: int) -> bool:
    """True if `cuts` fit a model of `num_layers` layers."""
    ascend = all(first < second for first, second in pairwise((*cuts, num_layers)))
    return not cuts or (cuts[0] == 0 and ascend)


@lru_cache(maxsize=64)
def object_layers(cuts: Cuts, num_layers: int) -> tuple[range, ...]:
    """The layers of each object; equal ones are the same tuple, since there are many pages."""
    bounds = (*(cuts or range(num_layers)), num_layers)
    return tuple(range(first, end) for first, end in pairwise(bounds))


def written_runs(layers: range, *, is_grouped: bool) -> tuple[range, ...]:
    """The layers of each object that a stage of `layers` writes of a page."""
    return (layers,) if is_grouped else tuple(range(layer, layer + 1) for layer in layers)


def cuts_of(runs: Iterable[range]) -> Cuts:
    """The cuts of a page whose objects have these layers, all layers in sequence."""
    runs = tuple(runs)
    return tuple(run.start for run in runs) if any(len(run) > 1 for run in runs) else ()


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """The `layers` of an object that has `num_bytes` of `object_layers`: they follow each other
    from `offset` on."""

    object_layers: range
    layers: range
    offset: int
    num_bytes: int


def object_parts(cuts: Cuts, sizes: Sequence[int], layers: range) -> Iterator[ObjectPart]:
    """The parts of objects that make up `layers`, in sequence.

    Args:
        sizes: bytes of each layer of the model.
    """
    for whole in object_layers(cuts, len(sizes)):
        part = range(max(whole.start, layers.start), min(whole.stop, layers.stop))
        if part:
            offset = sum(sizes[whole.start : part.start])
            yield ObjectPart(whole, part, offset, sum(sizes[whole.start : whole.stop]))
