"""The states of layers that go from one stage to another: all once, and again those that steps have
written meanwhile. Bytes are a fluid, as those of pages (`page_copies.py`).
"""

from collections.abc import Iterable
from itertools import takewhile

from sgl_pipeline.wire.move_orders import RESTING_STEPS

# As `pp_runner/layer_moves/outgoing_layers.py` has it.
MAX_ROUNDS = 4


class StateCopies:
    """Copies `slot_bytes` of each slot, 0 where no layer has states; at first those of `slots`.

    A slot that a step writes before it has left, or after, goes at the switch, or before that when
    steps have left it alone for a while, in rounds, as many as the stages' own.
    """

    def __init__(self, slot_bytes: int, slots: Iterable[int]) -> None:
        self._slot_bytes = slot_bytes
        self._left = dict.fromkeys(slots, float(slot_bytes)) if slot_bytes else {}
        # By slot, the last step that wrote it, ascending.
        self._written: dict[int, int] = {}
        self._num_steps = 0
        self.rounds = 1

    @property
    def queued_bytes(self) -> float:
        """Bytes that can go before the switch."""
        return sum(self._left.values())

    @property
    def awaited_bytes(self) -> float:
        """Bytes of these that a move waits for: none of the last rounds, which could go on for
        ever, since steps leave states alone again and again."""
        return self.queued_bytes if self.rounds < MAX_ROUNDS else 0.0

    def send(self, num_bytes: float) -> None:
        """So many of them go; slots one after the other, the last one first."""
        for slot, left in reversed([*self._left.items()]):
            if num_bytes < left:
                self._left[slot] -= num_bytes
                return
            num_bytes -= self._left.pop(slot)

    def wrote(self, slots: Iterable[int]) -> None:
        """A step has written to these."""
        if not self._slot_bytes:
            return
        self._num_steps += 1
        for slot in slots:
            self._left.pop(slot, None)
            self._written.pop(slot, None)
            self._written[slot] = self._num_steps
        self.begin_round()

    def begin_round(self) -> None:
        """If there is nothing left to send, a round of the slots that steps have left alone for a
        while begins, unless there were too many rounds."""
        if self._left or self.rounds >= MAX_ROUNDS:
            return
        newest = self._num_steps - RESTING_STEPS
        resting = [*takewhile(lambda one: self._written[one] <= newest, self._written)]
        self.rounds += bool(resting)
        for slot in resting:
            del self._written[slot]
            self._left[slot] = float(self._slot_bytes)

    def take_rest(self) -> float:
        """Bytes that go at the switch: after that there is nothing left."""
        num_bytes = self.queued_bytes + len(self._written) * self._slot_bytes
        self._left.clear()
        self._written.clear()
        return num_bytes
