"""The layers that go to one other stage: their pages are copied while steps go on writing them.

In rounds, as virtual machines are moved (pre-copy): the first sends all pages that hold anything,
each later one what was written meanwhile, until that is little. What is left is sent when the plan
has switched. Part of `LayerMover`; never starts a thread: it sends a parcel when it is asked to.
"""

from collections.abc import Iterable, Sequence
from typing import Generic

from sgl_pipeline.pp_runner.layer_moves.move_site import MoveSite, PageSender, Parcel, R

# A patch of so many pages of each layer is little: to copy them takes less than a step.
SMALL_PATCH_PAGES = 64
# More rounds would not end either: steps write as fast as pages are copied.
MAX_ROUNDS = 4


class OutgoingLayers(Generic[R]):
    """`copied_bytes` were sent before the switch, `patched_bytes` after it.

    Args:
        layers: those that go to the stage at the other end of `sender`.
        pages: that hold anything.
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
        self._written: set[int] = set()

    @property
    def is_ready(self) -> bool:
        """Whether all pages were sent once, and what was written since is little or stays much."""
        is_small = len(self._written) <= SMALL_PATCH_PAGES
        return not self._queue and (is_small or self._rounds >= MAX_ROUNDS)

    def wrote(self, pages: Iterable[int]) -> None:
        """A step has written to these pages."""
        self._written.update(pages)

    def work(self) -> bool:
        """Sends one parcel, if there is one to send and the target keeps up."""
        if not self._queue and len(self._written) > SMALL_PATCH_PAGES:
            if self._rounds >= MAX_ROUNDS:
                return False
            self._rounds += 1
            self._queue = self._parcels(sorted(self._written))
            self._written.clear()
        if not self._queue or not self._sender.can_send():
            return False
        parcel = self._site.read_pages(*self._queue.pop())
        self._sender.send(parcel)
        self.copied_bytes += parcel.num_bytes
        return True

    def finish(self) -> None:
        """Sends all that the target lacks; no step runs these layers here any more."""
        unsent = {page for _, pages in self._queue for page in pages}
        for layer, pages in self._parcels(sorted(self._written | unsent)):
            parcel = self._site.read_pages(layer, pages)
            self._sender.send(parcel)
            self.patched_bytes += parcel.num_bytes
        self._sender.send(Parcel(None, 0, is_last=True))

    def close(self) -> None:
        self._sender.close()

    def _parcels(self, pages: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
        """What to read for each parcel."""
        count = self._site.pages_per_parcel
        return [
            (layer, pages[start : start + count])
            for start in range(0, len(pages), count)
            for layer in self.layers
        ]
