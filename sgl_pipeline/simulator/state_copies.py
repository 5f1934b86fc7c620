"""The states of layers that go from one stage to another: all once, and again those that steps have
written meanwhile. Bytes are a fluid, as those of pages (`page_copies.py`).
"""

from collections.abc import Iterable


class StateCopies:
    """Of each slot, `slot_bytes` go, 0 where no layer has states; at first those of `slots`.

    A slot that a step writes before it has left goes at the switch, as one that is written after.
    """

    def __init__(self, slot_bytes: int, slots: Iterable[int]) -> None:
        self._slot_bytes = slot_bytes
        self._left = dict.fromkeys(slots, float(slot_bytes)) if slot_bytes else {}
        self._written: set[int] = set()

    @property
    def queued_bytes(self) -> float:
        """Bytes that can go before the switch."""
        return sum(self._left.values())

    def send(self, num_bytes: float) -> None:
        """So many of them go; slots one after the other."""
        for slot, left in [*self._left.items()]:
            if num_bytes < left:
                self._left[slot] -= num_bytes
                return
            num_bytes -= self._left.pop(slot)

    def wrote(self, slots: Iterable[int]) -> None:
        """A step has written to these."""
        if self._slot_bytes:
            self._written.update(slots)
            for slot in self._written.intersection(self._left):
                del self._left[slot]

    def take_rest(self) -> float:
        """Bytes that go at the switch: after that there is nothing left."""
        num_bytes = self.queued_bytes + len(self._written) * self._slot_bytes
        self._left.clear()
        self._written.clear()
        return num_bytes
