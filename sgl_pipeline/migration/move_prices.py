"""The price of layer moves, in seconds of the pipeline's time, learned from the moves.

A layer costs the same whichever it is, for its weights and pages, and one with states for each byte
that its slots hold besides. Either price is the median of the one at the start and those of the
last moves, and between two the lower one: a price that is too low is put right by the move that
follows, one that is too high by none. Pure.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from sgl_pipeline.migration.planner_args import PlannerArgs

# The moves that count.
LAST_MOVES = 5
# A move of fewer bytes says less about the price of a byte: they may have waited for something
# else, as a long step of the target. So it never raises the price above that at the start. A host
# copies as much in about 60 ms.
MANY_BYTES = 64 * 2**20


class _Move(NamedTuple):
    """A move that has cost `cost_s`, with `state_bytes` in use in its layers."""

    num_layers: int
    state_bytes: int
    cost_s: float


class MovePrices:
    """Begins with the prices of `args`; where these make layers free, moves stay free.

    Args:
        state_bytes: of a slot in each layer, 0 in one with pages; empty: no layer has states.
        count_slots: the number of state slots that hold anything now.
    """

    def __init__(
        self,
        args: PlannerArgs,
        state_bytes: Sequence[int] = (),
        count_slots: Callable[[], int] = lambda: 0,
    ) -> None:
        self._args = args
        self._layer_s = args.layer_price_s
        self._state_byte_s = args.state_byte_price_s
        self._state_bytes = tuple(state_bytes)
        self._count_slots = count_slots
        self._are_free = args.layer_price_s == 0.0
        self._moves: deque[_Move] = deque(maxlen=LAST_MOVES)
        # The price of a byte by the last moves that patched any, and how much they tell of it.
        self._bytes_s: deque[tuple[float, int]] = deque(maxlen=LAST_MOVES)

    def of(self, layers: Sequence[int]) -> float:
        """The price of moving these layers now."""
        move_s = self._args.move_price_s
        if self._are_free:
            return move_s
        states_s = self._bytes_in_use(layers) * self._state_byte_s
        return move_s + len(layers) * self._layer_s + states_s

    def learn(
        self, layers: Sequence[int], *, stalled_s: float, shared_s: float, patched_bytes: int
    ) -> None:
        """A move of these layers has just ended. Steps waited `stalled_s`, on the stage where they
        waited longest, for the `patched_bytes` that all stages sent at the switch, and stages
        worked `shared_s` for the move before that.

        A byte took no longer than steps waited for one, and all in use no longer than the move. The
        rest is the layers' own. Where no byte was patched, no step waited for one, and the move
        says nothing of a byte's price; its cost counts for the layers.
        """
        cost_s = stalled_s + shared_s
        state_bytes = self._bytes_in_use(layers)
        if state_bytes and patched_bytes:
            byte_s = min(cost_s / state_bytes, stalled_s / patched_bytes)
            if state_bytes < MANY_BYTES:
                byte_s = min(byte_s, self._args.state_byte_price_s)
            self._bytes_s.append((byte_s, min(state_bytes, MANY_BYTES)))
        self._moves.append(_Move(len(layers), state_bytes, cost_s))
        at_start = self._args.state_byte_price_s, MANY_BYTES
        self._state_byte_s = _lower_median([at_start, *self._bytes_s])
        layers_s = [(self._layer_price(one), 1) for one in self._moves]
        self._layer_s = _lower_median([(self._args.layer_price_s, 1), *layers_s])

    def _layer_price(self, move: _Move) -> float:
        """The price of each layer of `move`, without its states."""
        return max(0.0, move.cost_s - move.state_bytes * self._state_byte_s) / move.num_layers

    def _bytes_in_use(self, layers: Sequence[int]) -> int:
        """Bytes of these layers in the state slots that hold anything."""
        per_slot = sum(self._state_bytes[layer] for layer in layers) if self._state_bytes else 0
        return self._count_slots() * per_slot


def _lower_median(weighted: list[tuple[float, int]]) -> float:
    """The least of some values such that those up to it have half of the weight of all."""
    ordered = sorted(weighted)
    sums = accumulate(weight for _, weight in ordered)
    half = sum(weight for _, weight in ordered) / 2
    return next(value for (value, _), up_to in zip(ordered, sums, strict=True) if up_to >= half)
