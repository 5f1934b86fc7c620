"""The layers that go to one other stage: they are copied while steps go on writing them.

Pages in rounds, as virtual machines are moved (pre-copy): the first sends all pages that hold
anything, each later one the pages written since, until these are few. The rest is sent when the
plan has switched. States after the page rounds, and only those that no step has written
meanwhile: a request that runs writes its state all the time, so no round would leave fewer of them.
Of those that were written the ones that steps have left alone since, mostly of requests that have
ended and of snapshots, go in further rounds; the others go when the plan has switched.

It never starts a thread: it reads and sends a parcel on request. Parcels are sent in the order in
which they were read, so that a page that was written again comes after its older version.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import Generic

from sgl_pipeline.pp_runner.layer_moves.move_site import (
    LeavingPages,
    MoveSite,
    PageSender,
    Parcel,
    R,
)
from sgl_pipeline.wire.move_orders import RESTING_STEPS

# A patch of this many pages of each layer is small: copying them takes less than a step.
SMALL_PATCH_PAGES = 64
# More rounds would not end either: steps write as fast as pages are copied, and where they take few
# of the decodes, they leave the state of a request that runs alone and write it again. Pages and
# states have this many each.
MAX_ROUNDS = 4
# Parcels that are read at once: while one is sent the next one comes to the host.
MAX_READING = 2


class OutgoingLayers(Generic[R]):
    """`copied_bytes` were sent before the switch, `patched_bytes` after it.

    Args:
        layers: the layers that go to the stage at the other end of `sender`.
        pages: the pages that hold anything.
        slots: the state slots that hold anything.
    """

    def __init__(
        self,
        layers: Sequence[int],
        pages: Sequence[int],
        slots: Sequence[int],
        site: MoveSite[R],
        sender: PageSender[R],
    ) -> None:
        self.layers = tuple(layers)
        self.copied_bytes = 0
        self.patched_bytes = 0
        self._site = site
        self._sender = sender
        self._with_states = tuple(layer for layer in layers if site.has_states(layer))
        self._with_pages = tuple(layer for layer in layers if not site.has_states(layer))
        self._rounds = 1
        self._queue = self._parcels(self._with_pages, pages)
        self._state_queue = self._parcels(self._with_states, slots)
        self._reading: deque[LeavingPages[R]] = deque()
        # What the target lacks at the end; None before that.
        self._rest: deque[tuple[int, Sequence[int]]] | None = None
        self._has_ended = False
        self._written: set[int] = set()
        # By slot, the last step that wrote it, ascending.
        self._written_slots: dict[int, int] = {}
        self._num_steps = 0
        self._state_rounds = 1

    @property
    def is_ready(self) -> bool:
        """True if all was sent once, except states that go after the switch, and what was written
        since and could go before it is little, or would never become little."""
        is_small = len(self._written) <= SMALL_PATCH_PAGES
        awaits_states = bool(self._state_queue) and self._state_rounds < MAX_ROUNDS
        is_sent = not (self._queue or awaits_states or self._reading)
        return is_sent and (is_small or self._rounds >= MAX_ROUNDS)

    def wrote(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        """A step has written to these pages and state slots."""
        if self._with_pages:
            self._written.update(pages)
        if self._with_states:
            self._num_steps += 1
            for slot in slots:
                self._written_slots.pop(slot, None)
                self._written_slots[slot] = self._num_steps

    def work(self) -> bool:
        """Sends parcels that were read, and begins to read one, if there is one to send and the
        target keeps up. False: there is nothing to do now."""
        if self._rest is not None:
            return False
        did_send = self._send_read()
        has_more = len(self._written) > SMALL_PATCH_PAGES and self._rounds < MAX_ROUNDS
        if not self._queue and has_more:
            self._rounds += 1
            self._queue = self._parcels(self._with_pages, sorted(self._written))
            self._written.clear()
        has_rounds = self._state_rounds < MAX_ROUNDS
        if not self._state_queue and has_rounds and (resting := self._resting_slots()):
            self._state_rounds += 1
            self._state_queue = self._parcels(self._with_states, resting)
            for slot in resting:
                del self._written_slots[slot]
        is_busy = len(self._reading) >= MAX_READING
        if is_busy or not (self._queue or self._state_queue) or not self._sender.can_send():
            return did_send
        if self._queue:
            self._reading.append(self._site.read(*self._queue.pop()))
        else:
            layer, slots = self._state_queue.pop()
            if still := [slot for slot in slots if slot not in self._written_slots]:
                self._reading.append(self._site.read(layer, still))
        self._send_read()
        return True

    def begin_rest(self) -> None:
        """No step runs these layers here any more: what the target lacks is to be sent."""
        self._rest = deque(
            (
                *self._parcels(self._with_pages, _unsent(self._queue, self._written)),
                *self._parcels(self._with_states, _unsent(self._state_queue, self._written_slots)),
            )
        )

    def send_rest(self) -> bool:
        """Sends of what the target lacks as much as it has room for; True when all is sent.

        Room is asked for where there are states: those of many requests would fill the memory that
        both share.
        """
        assert self._rest is not None
        while self._rest or self._reading:
            if self._rest and len(self._reading) < MAX_READING:
                self._reading.append(self._site.read(*self._rest.popleft()))
            elif self._with_states and not self._sender.has_room():
                return False
            else:
                self.patched_bytes += self._send_next()
        if not self._has_ended:
            self._has_ended = True
            self._sender.send(Parcel(None, 0, is_last=True))
        return True

    def close(self) -> None:
        self._sender.close()

    def _resting_slots(self) -> list[int]:
        """The slots that no step has written for a while, since they were sent or ever."""
        newest = self._num_steps - RESTING_STEPS
        return [*takewhile(lambda slot: self._written_slots[slot] <= newest, self._written_slots)]

    def _send_read(self) -> bool:
        """Sends parcels that were read; returns whether there was one."""
        did_send = False
        while self._reading and self._reading[0].is_read():
            self.copied_bytes += self._send_next()
            did_send = True
        return did_send

    def _send_next(self) -> int:
        """Sends the next parcel; returns its bytes."""
        parcel = self._reading.popleft().parcel()
        self._sender.send(parcel)
        return parcel.num_bytes

    def _parcels(
        self, layers: Sequence[int], places: Sequence[int]
    ) -> list[tuple[int, Sequence[int]]]:
        """The places to read for each parcel."""
        if not layers:
            return []
        count = min(map(self._site.places_per_parcel, layers))
        return [
            (layer, places[start : start + count])
            for start in range(0, len(places), count)
            for layer in layers
        ]


def _unsent(queue: Iterable[tuple[int, Sequence[int]]], written: Collection[int]) -> list[int]:
    """The places that the target lacks: those to be sent still, and those written since."""
    return sorted({*written, *(place for _, places in queue for place in places)})
