"""The state slots of requests, in models with layers that keep a state in place of keys and values.

A slot is a request's place in the pools of states, one number for all layers and stages, as a page
id is. A request owns one from its admission until its pages come back. What a slot holds of the
request before is of no use: the chunk at position 0 begins with zeros.
"""

from collections.abc import Iterable

from sgl_pipeline.requests import Request


class StateSlots:
    """Slots 0 to `num_slots - 1`; 0 slots: the model has no states, and requests need none."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def are_taken(self) -> bool:
        """True if requests need slots, and none is free."""
        return self.num_slots > 0 and not self._free

    @property
    def in_use(self) -> list[int]:
        """The slots that hold anything, ascending."""
        return sorted(set(range(self.num_slots)).difference(self._free))

    def resize(self, num_slots: int) -> None:
        """Changes the number of slots, of at least one; none is in use."""
        assert self.num_slots > 0 and num_slots > 0, "slots neither begin nor end with a resize"
        assert not self.in_use, "state slots are in use"
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    def give(self, request: Request) -> None:
        """Gives an admitted request its slot; the caller makes sure that not all are taken."""
        if self.num_slots > 0:
            assert request.state_slot is None, f"{request.request_id} has a state slot"
            request.state_slot = self._free.pop()

    def take_back(self, request: Request) -> None:
        """Takes back the slot of a request without steps in flight, if it has one."""
        if request.state_slot is not None:
            assert request.state_slot not in self._free, "a state slot was freed twice"
            self._free.append(request.state_slot)
            request.state_slot = None

    def check_owners(self, holders: Iterable[Request]) -> None:
        """Asserts that each slot is free or owned by exactly one of `holders`, the requests that
        hold pages, and that each of them owns one."""
        if self.num_slots > 0:
            slots = [*self._free, *(one.state_slot for one in holders)]
            assert len(slots) == self.num_slots, f"{len(slots)} of {self.num_slots} state slots"
            assert set(slots) == set(range(self.num_slots)), f"state slots: {slots}"
