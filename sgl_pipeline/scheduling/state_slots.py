"""The state slots of a model with layers that keep a state in place of keys and values.

A slot is a place in the pools of states, one number for all layers and stages, as a page id is. A
request owns one from its admission until its pages come back, which holds its current state. Others
hold snapshots (`state_snapshots.py`), which give way where a request wants a slot. What a slot held
before is of no use: the chunk at position 0 begins with zeros.
"""

from collections.abc import Iterable
from typing import Protocol

from sgl_pipeline.requests import Request


class SlotSource(Protocol):
    """Has slots to give up where a request wants one."""

    @property
    def num_evictable(self) -> int:
        """Slots that `evict` would free, one after the other."""

    def evict(self) -> None:
        """Frees one slot; there is one to be freed."""


class StateSlots:
    """Slots 0 to `num_slots - 1`; 0 slots: the model has no states, and requests need none.
    `source` gives up slots where none is free."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.source: SlotSource | None = None
        self._free = _free_slots(num_slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that hold anything."""
        return self.num_slots - len(self._free)

    @property
    def num_evictable(self) -> int:
        """Slots of snapshots that would give way."""
        return 0 if self.source is None else self.source.num_evictable

    @property
    def are_taken(self) -> bool:
        """True if requests need slots, and none is free or would give way."""
        return self.num_slots > 0 and not self._free and not self.num_evictable

    def in_use(self) -> list[int]:
        """The slots that hold anything, ascending."""
        return sorted(set(range(self.num_slots)).difference(self._free))

    def resize(self, num_slots: int) -> None:
        """Changes the number of slots, of at least one; none is in use."""
        assert self.num_slots > 0 and num_slots > 0, "slots neither begin nor end with a resize"
        assert not self.in_use(), "state slots are in use"
        self.num_slots = num_slots
        self._free = _free_slots(num_slots)

    def give(self, request: Request) -> None:
        """Gives an admitted request its slot; the caller makes sure that not all are taken."""
        if self.num_slots > 0:
            assert request.state_slot is None, f"{request.request_id} has a state slot"
            if not self._free:
                assert self.source is not None, "all state slots are taken"
                self.source.evict()
            request.state_slot, _ = self._free.popitem()

    def take_back(self, request: Request) -> None:
        """Takes back the slot of a request without steps in flight, if it has one."""
        if request.state_slot is not None:
            self.put_back(request.state_slot)
            request.state_slot = None

    def take_free(self) -> int | None:
        """A free slot for a snapshot; None if there is none."""
        return self._free.popitem()[0] if self._free else None

    def put_back(self, slot: int) -> None:
        """Takes back a slot that no step will read any more."""
        assert slot not in self._free, "a state slot was freed twice"
        self._free[slot] = None

    def check_owners(self, holders: Iterable[Request], snapshots: Iterable[int] = ()) -> None:
        """Asserts that each slot is free, one of `snapshots`, or owned by exactly one of `holders`,
        the requests that hold pages, and that each of them owns one."""
        if self.num_slots > 0:
            slots = [*self._free, *snapshots, *(one.state_slot for one in holders)]
            assert len(slots) == self.num_slots, f"{len(slots)} of {self.num_slots} state slots"
            assert set(slots) == set(range(self.num_slots)), f"state slots: {slots}"


def _free_slots(num_slots: int) -> dict[int, None]:
    """All of them, as an ordered set, of which the last one is given out next."""
    return dict.fromkeys(range(num_slots - 1, -1, -1))
