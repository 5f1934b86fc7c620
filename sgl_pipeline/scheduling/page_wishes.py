"""Prefixes that waiting requests want from the store, looked up in the order of the queue.

A request that arrives is held until it is known how much of its prefix the store has, and then
until a load of it begins (`page_loads.py`) or is not worth it. Only the first requests of the queue
are looked up, ahead of need: the look-ahead is CachedAttention's (ATC'24, section 3.3.1).
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_pipeline.page_record import PageRecord
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.page_hashing import prefix_hashes
from sgl_pipeline.scheduling.radix_storage import RadixStorage
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.tier_counts import TierCounts
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class Lookup:
    """The question which of `hashes`, from the first on, the store has."""

    number: int
    hashes: tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class Wish:
    """A waiting request whose prefix may be in the store, behind its first `start` tokens.
    `records` are of the pages that were found there, or that the peer `source` has.
    `is_dropped`: they are not wanted any more."""

    request: Request
    held_s: float
    start: int = 0
    records: Sequence[PageRecord] = ()
    source: str = ""
    is_dropped: bool = False

    def __lt__(self, other: "Wish") -> bool:
        return self.request.order < other.request.order

    def lacking(self, match: RadixNode, page_size: int) -> Sequence[PageRecord]:
        """The records of the pages that follow the cached `match`, which does not end before
        `start`."""
        return self.records[(match.end - self.start) // page_size :]


class PageWishes:
    """All that is to be looked up, is being looked up, or was found and is to be loaded."""

    def __init__(self, storage: RadixStorage, waiting: WaitingQueue, counts: TierCounts) -> None:
        self._storage, self._waiting, self._counts = storage, waiting, counts
        self._held: deque[Wish] = deque()  # all that are held, and some that are not any more
        self._new: list[Wish] = []  # a heap, to be looked up
        self._asked: dict[int, Wish] = {}
        self._found: list[Wish] = []  # a heap, to be loaded
        self._next_lookup = 0

    def queued(self, request: Request, rules: TierRules, now_s: float) -> None:
        """`request` has entered the queue: holds it if its prefix may be worth a load."""
        path = self._waiting.path_of(request)
        if path.end - self._storage.match(path).end < rules.least_tokens:
            return
        wish = Wish(request, now_s)
        self._waiting.hold(request)
        self._held.append(wish)
        heapq.heappush(self._new, wish)

    # Lookups

    def take_lookups(self, most: int) -> list[Lookup]:
        """The next questions for the store, of the requests that are served first: until `most` are
        asked or found."""
        page_size = self._storage.page_size
        lookups: list[Lookup] = []
        while self._new and len(self._asked) + len(self._found) < most:
            wish = heapq.heappop(self._new)
            if wish.request not in self._waiting:
                continue
            path = self._waiting.path_of(wish.request)
            wish.start = self._storage.match(path).end
            hashes = prefix_hashes(path, page_size)
            number = self._next_lookup
            self._next_lookup += 1
            self._asked[number] = wish
            lookups.append(Lookup(number, tuple(hashes[wish.start // page_size :])))
        self._counts.num_lookups += len(lookups)
        return lookups

    def answered(self, number: int, records: Sequence[PageRecord]) -> None:
        """The store's answer: the records of the first pages that were asked for. An answer that
        no request waits for any more has no effect."""
        wish = self._asked.pop(number, None)
        if wish is None:
            return
        self._counts.num_hits += bool(records)
        self._counts.found_tokens += len(records) * self._storage.page_size
        if not records or wish.request not in self._waiting:
            self._waiting.let_go(wish.request)
            return
        wish.records = records
        heapq.heappush(self._found, wish)

    def ask_again(self, wish: Wish) -> None:
        """Looks up a found `wish` once more."""
        heapq.heappush(self._new, wish)

    # What was found

    @property
    def has_found(self) -> bool:
        """True if there may be something to load."""
        return bool(self._found)

    def pop_found(self) -> Wish | None:
        """The found wish of the request that is served first, which is the caller's now."""
        while self._found:
            wish = heapq.heappop(self._found)
            if wish.request in self._waiting and not wish.is_dropped:
                return wish
        return None

    def put_back(self, wish: Wish) -> None:
        """Enters a found wish: one from `pop_found` that cannot be loaded yet, or a peer's."""
        heapq.heappush(self._found, wish)

    # Ends

    def give_up_late(self, now_s: float, rules: TierRules) -> None:
        """Requests that have been held for too long compute. What is found for them later can still
        be loaded while they wait for their turn."""
        while self._held and now_s - self._held[0].held_s >= rules.patience_s(0):
            self._let_go_late(self._held.popleft(), now_s, rules)
        for wish in self._found:
            self._let_go_late(wish, now_s, rules)

    def _let_go_late(self, wish: Wish, now_s: float, rules: TierRules) -> None:
        num_tokens = len(wish.records) * self._storage.page_size
        if now_s - wish.held_s >= rules.patience_s(num_tokens):
            self._waiting.let_go(wish.request)

    def cancel(self) -> list[Request]:
        """Forgets all; returns the requests that were held."""
        wishes = (*self._new, *self._asked.values(), *self._found)
        requests = [wish.request for wish in wishes if self._waiting.is_held(wish.request)]
        for request in requests:
            self._waiting.let_go(request)
        self._held.clear()
        self._new.clear()
        self._asked.clear()
        self._found.clear()
        return requests
