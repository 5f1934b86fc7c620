"""The pages of a stage that peers may read now, and the copies out of them.

One thread reads (`page_server.py`); everything else is for the thread of the steps. A copy begins
under a lock, and only of a page that is offered at that moment. So from the moment that an offer
was withdrawn or forgotten its pages may be written again, and the network is never waited for.
"""

import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_pipeline.pp_runner.page_store.pool_pages import Bytes, PageCopies, PoolPages
from sgl_pipeline.wire.peer_messages import (
    FRAME_BYTES,
    Answer,
    NotYet,
    PageFrame,
    ReadPages,
    Refused,
)

# Offers whose end is remembered: a late reader of any other waits in vain before it is refused.
MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class _Offer:
    """`pages` by their hashes, which are right after `steps` (`PoolPages.steps_so_far`)."""

    digest: str
    pages: Mapping[bytes, int]
    steps: object


@dataclass(frozen=True, slots=True)
class _Held:
    """The layers that the stage has while its offers last."""

    layers: range
    pages: PoolPages
    copies: PageCopies


class _NotReadable(Exception):
    def __init__(self, answer: NotYet | Refused) -> None:
        self.answer = answer


class OfferedPages:
    """At first there are none.

    Args:
        sizes: bytes of a page of each layer of the model.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._held: _Held | None = None
        self._offers: dict[int, _Offer] = {}
        self._withdrawn: dict[int, None] = {}  # in the sequence of their ends
        # Guards all of the above, and the pool.
        self._lock = threading.Lock()

    @property
    def knows_layers(self) -> bool:
        """True if `hold` was called since the offers were forgotten."""
        return self._held is not None

    def hold(self, layers: range, pages: PoolPages) -> None:
        """The next offers are of `pages` of `layers`."""
        all_bytes = sum(self._sizes[layer] for layer in layers)
        frame_bytes = min(all_bytes, FRAME_BYTES + max(self._sizes))
        with self._lock:
            self._held = _Held(layers, pages, pages.copies_out(frame_bytes))

    def is_offered(self, number: int) -> bool:
        """True if an offer has been made and has not ended."""
        return number in self._offers

    def offer(self, number: int, digest: str, pages: Mapping[bytes, int]) -> None:
        """Lets peers read pages, given by their hashes, as the steps until now have left them."""
        assert self._held is not None
        made = _Offer(digest, pages, self._held.pages.steps_so_far())
        with self._lock:
            self._offers[number] = made

    def withdraw(self, number: int) -> None:
        """Ends an offer, if it was made. No copy of its pages begins from here on, and the next
        steps come after those that have begun."""
        with self._lock:
            self._offers.pop(number, None)
            self._withdrawn[number] = None
            if len(self._withdrawn) > MAX_REMEMBERED:
                del self._withdrawn[next(iter(self._withdrawn))]
            self._let_steps_follow()

    def forget(self) -> None:
        """Ends all offers as `withdraw` does; they may be made again, of other layers."""
        with self._lock:
            self._offers.clear()
            self._let_steps_follow()
            self._held = None

    def read(self, request: ReadPages, index: int, first: int) -> Answer:
        """The next layers, from `first` on, of the page at `index` of a request; or the reason for
        which they cannot be read, or not yet. The content stays as it is until the next call."""
        held, num_bytes, layer = self._held, 0, first
        content: Bytes | None = None
        try:
            while layer < request.layers[1] and num_bytes < FRAME_BYTES:
                with self._lock:
                    page, steps = self._page_of(request, index, layer)
                    if held is None or held is not self._held:
                        return NotYet()  # forgotten and offered again, since the first layer
                    if content is None:
                        held.copies.begin(steps)
                        content = held.copies.buffer()
                    held.copies.copy(layer, page, content, num_bytes)
                num_bytes += self._sizes[layer]
                layer += 1
        except _NotReadable as reason:
            return reason.answer
        assert held is not None and content is not None
        held.copies.wait()
        frame = content.data[:num_bytes]
        return PageFrame(index, (first, layer), zlib.crc32(frame), frame)

    def _page_of(self, request: ReadPages, index: int, layer: int) -> tuple[int, object]:
        """A page that is offered, and the steps that it comes after. Raises _NotReadable."""
        offer = self._offer_of(request)
        page = offer.pages.get(request.hash_of(index))
        if page is None:
            name = request.hash_of(index).hex()
            raise _NotReadable(Refused(f"page {name} is not part of offer {request.offer}"))
        held = self._held
        assert held is not None
        if layer not in held.layers:
            raise _NotReadable(Refused(
                f"layer {layer} is not here, but {held.layers.start} to {held.layers.stop - 1}"
            ))  # fmt: skip
        return page, offer.steps

    def _offer_of(self, request: ReadPages) -> _Offer:
        offer = self._offers.get(request.offer)
        if offer is None:
            is_over = request.offer in self._withdrawn
            answer = Refused(f"offer {request.offer} was withdrawn") if is_over else NotYet()
            raise _NotReadable(answer)
        if offer.digest != request.digest:
            raise _NotReadable(Refused(
                f"its pages are of another model or format, {offer.digest}, not {request.digest}"
            ))  # fmt: skip
        return offer

    def _let_steps_follow(self) -> None:
        if self._held is not None:
            self._held.pages.let_steps_follow()
