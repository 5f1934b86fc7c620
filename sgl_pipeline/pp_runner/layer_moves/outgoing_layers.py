"""The layers that go to one other stage: their pages are copied while steps go on writing them.

In rounds, as virtual machines are moved (pre-copy): the first sends all pages that hold anything,
each later one the pages written since, until these are few. The rest is sent when the plan has
switched. It never starts a thread: it reads and sends a parcel on request. Parcels are sent in the
order in which they were read, so that a page that was written again comes after its older version.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic

from sgl_pipeline.pp_runner.layer_moves.move_site import (
    LeavingPages,
    MoveSite,
    PageSender,
    Parcel,
    R,
)

# A patch of this many pages of each layer is small: copying them takes less than a step.
SMALL_PATCH_PAGES = 64
# More rounds would not end either: steps write as fast as pages are copied.
MAX_ROUNDS = 4
# Parcels that are read at once: while one is sent the next one comes to the host.
MAX_READING = 2


class OutgoingLayers(Generic[R]):
    """`copied_bytes` were sent before the switch, `patched_bytes` after it.

    Args:
        layers: the layers that go to the stage at the other end of `sender`.
        pages: the pages that hold anything.
    """

    def __init__(
        self, layers: Sequence[int], pages: Sequence[int], site: MoveSite[R], sender: PageSender[R]
    ) -> None:
        self.layers = tuple(layers)
        self.copied_bytes = 0
        self.patched_bytes = 0
        self._site = site
        self._sender = sender
        self._rounds = 1
        self._queue = self._parcels(pages)
        self._reading: deque[LeavingPages[R]] = deque()
        self._written: set[int] = set()

    @property
    def is_ready(self) -> bool:
        """True if all pages were sent once, and the pages written since are few, or would never
        become few."""
        is_small = len(self._written) <= SMALL_PATCH_PAGES
        is_sent = not self._queue and not self._reading
        return is_sent and (is_small or self._rounds >= MAX_ROUNDS)

    def wrote(self, pages: Iterable[int]) -> None:
        """A step has written to these pages."""
        self._written.update(pages)

    def work(self) -> bool:
        """Sends parcels that were read, and begins to read one, if there is one to send and the
        target keeps up. False: there is nothing to do now."""
        did_send = self._send_read()
        if not self._queue and len(self._written) > SMALL_PATCH_PAGES:
            if self._rounds >= MAX_ROUNDS:
                return did_send
            self._rounds += 1
            self._queue = self._parcels(sorted(self._written))
            self._written.clear()
        is_busy = len(self._reading) >= MAX_READING
        if not self._queue or is_busy or not self._sender.can_send():
            return did_send
        self._reading.append(self._site.read_pages(*self._queue.pop()))
        self._send_read()
        return True

    def finish(self) -> None:
        """Sends all pages that the target lacks; no step runs these layers here any more."""
        unsent = {page for _, pages in self._queue for page in pages}
        for layer, pages in self._parcels(sorted(self._written | unsent)):
            self._reading.append(self._site.read_pages(layer, pages))
            if len(self._reading) > MAX_READING:
                self.patched_bytes += self._send_next()
        while self._reading:
            self.patched_bytes += self._send_next()
        self._sender.send(Parcel(None, 0, is_last=True))

    def close(self) -> None:
        self._sender.close()

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

    def _parcels(self, pages: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
        """The pages to read for each parcel."""
        count = self._site.pages_per_parcel
        return [
            (layer, pages[start : start + count])
            for start in range(0, len(pages), count)
            for layer in self.layers
        ]
