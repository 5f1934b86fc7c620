"""Prompts that were computed here for other servers, and are kept until these have read them.

A held prompt's pages are locked: they count as used, so a reader that is slow holds up this server.
They are offered to peers by an order in the stream (`wire/store_orders.py`), and are locked until
after the order that withdraws them, so no page is given out that a peer may still read.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass

from sgl_pipeline.scheduling.page_hashing import prefix_hashes
from sgl_pipeline.scheduling.radix_storage import RadixStorage
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.wire.step_order import INT32
from sgl_pipeline.wire.store_orders import OfferOrder, OfferPages, WithdrawPages


@dataclass(slots=True, eq=False)
class _Held:
    """The prefix that ends with `end`, which is locked, and its pages."""

    end: RadixNode
    pages: list[int]
    is_lent: bool = False


class HeldPages:
    """The held prompts, by the numbers of their rooms; each number is held at most once.

    A driver takes `offered`, the rooms whose pages can be read from now on (some again), and
    `lost`, those whose pages are gone, and empties them.
    """

    def __init__(self, storage: RadixStorage, pages: RequestPages) -> None:
        self._storage, self._pages = storage, pages
        self._digest: str | None = None
        self._most_share = 0.0
        self._held: dict[int, _Held] = {}
        self._num_holds: Counter[int] = Counter()  # of each page that is held
        self._to_offer: dict[int, None] = {}
        self._withdrawn: dict[int, RadixNode] = {}
        self.has_offers = False  # the stages know of one
        self.offered: list[int] = []
        self.lost: list[int] = []

    def begin(self, digest: str, most_share: float) -> None:
        """From now on prompts are held for servers with this `digest`; no request is admitted while
        more than `most_share` of all pages are."""
        self._digest, self._most_share = digest, most_share

    @property
    def is_on(self) -> bool:
        """True if this server computes prompts for others."""
        return self._digest is not None

    @property
    def num_pages(self) -> int:
        """Pages that are held to be read: those of lent prompts do not count."""
        return len(self._num_holds)

    @property
    def num_rooms(self) -> int:
        """Prompts that are held."""
        return len(self._held)

    @property
    def most_pages(self) -> int:
        """With more held pages no request is admitted."""
        return int(self._most_share * self._pages.num_pages)

    @property
    def is_full(self) -> bool:
        """True if no request may be admitted until some pages have been read."""
        return self.num_pages > self.most_pages

    def hold(self, room: int, end: RadixNode, owed: Set[int]) -> None:
        """Holds the cached prefix that ends with `end`, unless a page of it is `owed`: then some
        stage lacks its contents, and the room is lost."""
        assert room not in self._held and room not in self._withdrawn
        held = _Held(end, self._storage.pages_of(end))
        if not owed.isdisjoint(held.pages):
            self.lost.append(room)
            return
        self._storage.lock(end)
        self._held[room] = held
        self._num_holds.update(held.pages)
        self._to_offer[room] = None

    def pages_of(self, room: int) -> int:
        """Number of pages held for the room; 0 for one that has none."""
        held = self._held.get(room)
        return 0 if held is None else len(held.pages)

    def page_hash(self, room: int, index: int) -> bytes | None:
        """The hash of a page that is held for the room; None if there is none."""
        held = self._held.get(room)
        if held is None or not 0 <= index < len(held.pages):
            return None
        return prefix_hashes(held.end, self._storage.page_size)[index]

    def prompt_of(self, room: int) -> _Held | None:
        """The prompt that is held for the room, if there is one."""
        return self._held.get(room)

    def count_lent(self, room: int, *, is_lent: bool) -> None:
        """Notes whether the prompt of the room, if it is held, is lent."""
        held = self._held.get(room)
        if held is None or held.is_lent == is_lent:
            return
        if is_lent:
            self._uncount(held)
        else:
            self._num_holds.update(held.pages)
        held.is_lent = is_lent

    def let_go(self, room: int) -> None:
        """Ends a hold, if there is one."""
        is_offered = room not in self._to_offer
        held = self._forget(room)
        if held is None:
            return
        if is_offered and held.pages:
            self._withdrawn[room] = held.end
        else:
            self._storage.unlock(held.end)

    def next_orders(self) -> Iterator[OfferOrder]:
        """Withdraws and makes offers. An order is in the stream when the next one is asked for."""
        for room, end in [*self._withdrawn.items()]:
            yield WithdrawPages(room)
            del self._withdrawn[room]
            self._storage.unlock(end)
        for room in [*self._to_offer]:
            held = self._held[room]
            if held.pages:
                yield self._offer(room, held)
            del self._to_offer[room]
            self.offered.append(room)

    def forget_offers(self) -> None:
        """The next order makes the stages forget all offers: they are made again behind it."""
        for end in self._withdrawn.values():
            self._storage.unlock(end)
        self._withdrawn.clear()
        self._to_offer = dict.fromkeys(self._held)

    def lose_all(self) -> None:
        """The pages' contents are lost, and with them all offers."""
        self.forget_offers()
        for room, held in self._held.items():
            self._storage.unlock(held.end)
            self.lost.append(room)
        self._held.clear()
        self._to_offer.clear()
        self._num_holds.clear()

    def _offer(self, room: int, held: _Held) -> OfferPages:
        assert self._digest is not None
        self.has_offers = True
        hashes = b"".join(prefix_hashes(held.end, self._storage.page_size))
        return OfferPages(room, array(INT32, held.pages).tobytes(), hashes, self._digest)

    def _forget(self, room: int) -> _Held | None:
        held = self._held.pop(room, None)
        if held is None:
            return None
        self._to_offer.pop(room, None)
        if not held.is_lent:
            self._uncount(held)
        return held

    def _uncount(self, held: _Held) -> None:
        for page in held.pages:
            self._num_holds[page] -= 1
            if not self._num_holds[page]:
                del self._num_holds[page]
