"""The price of layer moves, in seconds of the pipeline's time, learned from the moves.

A layer costs the same whichever it is, for its weights and pages, and one with states for each byte
that its slots hold besides. Pure.
"""

from collections.abc import Callable, Sequence

from sgl_pipeline.migration.planner_args import PlannerArgs


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
        self._move_s = args.move_price_s
        self._layer_s = args.layer_price_s
        self._state_byte_s = args.state_byte_price_s
        self._state_bytes = tuple(state_bytes)
        self._count_slots = count_slots
        self._are_free = args.layer_price_s == 0.0

    def of(self, layers: Sequence[int]) -> float:
        """The price of moving these layers now."""
        if self._are_free:
            return self._move_s
        return self._move_s + len(layers) * self._layer_s + self._states_s(layers)

    def learn(
        self, layers: Sequence[int], *, stalled_s: float, shared_s: float, patched_bytes: int
    ) -> None:
        """A move of these layers has just ended. Steps waited `stalled_s`, on the stage where they
        waited longest, for the `patched_bytes` that all stages sent at the switch, and stages
        worked `shared_s` for the move before that.

        The same move would cost now what it has cost and no more: of few patched bytes each may
        have waited for something else, as a long step of the target.
        """
        if self._are_free:
            return
        cost_s = stalled_s + shared_s
        state_bytes = self._count_slots() * self._bytes_per_slot(layers)
        if state_bytes and patched_bytes:
            self._state_byte_s = min(stalled_s / patched_bytes, cost_s / state_bytes)
        self._layer_s = max(0.0, cost_s - self._states_s(layers)) / len(layers)

    def _states_s(self, layers: Sequence[int]) -> float:
        return self._count_slots() * self._bytes_per_slot(layers) * self._state_byte_s

    def _bytes_per_slot(self, layers: Sequence[int]) -> int:
        return sum(self._state_bytes[layer] for layer in layers) if self._state_bytes else 0
