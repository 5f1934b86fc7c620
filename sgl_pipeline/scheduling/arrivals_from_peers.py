"""Requests whose prompt another server computes: held until its pages are here, or given up.

A prompt arrives as a load of its pages (`page_loads.py`) out of the other server's pool, so that
the request is then a waiting request with a radix hit. It is held during the load, too: whether
what has come is enough, or is asked for again, or computed here, is decided elsewhere
(`sgl_pipeline/disaggregation/`).
"""

import math
from dataclasses import dataclass

from sgl_pipeline.page_record import PageRecord
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.page_hashing import prefix_hashes
from sgl_pipeline.scheduling.page_wishes import PageWishes, Wish
from sgl_pipeline.scheduling.radix_storage import RadixStorage
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue


@dataclass(slots=True, eq=False)
class _Arrival:
    """A held request. `wish` asks for its pages; None until they can be read: then `num_lacking` of
    `num_pages` were not cached. `is_loading`: an order to load some of them is under way; the first
    was given at `first_load_s`. Without a wish, `source` is asked to lend them."""

    source: str = ""
    wish: Wish | None = None
    num_pages: int = 0
    num_lacking: int = 0
    is_loading: bool = False
    first_load_s: float | None = None

    @property
    def waits_for_room(self) -> bool:
        """True if its pages can be read, and are not on their way."""
        return self.wish is not None and not self.is_loading


@dataclass(slots=True)
class ArrivalCounts:
    """Totals since the start. `load_s` sums the seconds that stages were busy."""

    loaded_pages: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    last_message: str = ""  # of a stage that could not load


class ArrivalsFromPeers:
    """All requests that are held for another server.

    A driver takes `ended`, the requests that have no load under way any more and get no further one
    unless they are `found` again, and empties it.
    """

    def __init__(
        self,
        storage: RadixStorage,
        waiting: WaitingQueue,
        running: RunningRequests,
        wishes: PageWishes,
    ) -> None:
        self._storage, self._waiting, self._running = storage, waiting, running
        self._wishes = wishes
        self._reserved_tokens: int | None = None
        self._held: dict[Request, _Arrival] = {}
        # Requests that may load or have loaded, and do not run yet; and what they may draw.
        self._promised: dict[Request, int] = {}
        self.promised_output_tokens = 0
        self.counts = ArrivalCounts()
        self.ended: list[Request] = []

    def begin(self, reserved_tokens: int) -> None:
        """From now on requests with a room are held. A load begins while there is room for
        `reserved_tokens` more tokens of each request that runs or has a load before it."""
        self._reserved_tokens = reserved_tokens

    @property
    def is_on(self) -> bool:
        """True if other servers compute prompts for this one."""
        return self._reserved_tokens is not None

    # What comes in

    def queued(self, request: Request) -> bool:
        """True if `request`, which has entered the queue or lost its load, is held here."""
        if not self.is_on or request.room is None or request.num_retractions:
            return False
        arrival = self._held.get(request)
        if arrival is None:
            if request in self._promised:
                return False  # it was let go
            self._held[request] = _Arrival()
        elif arrival.wish is not None:
            self.found(request, arrival.source, arrival.num_pages)
        self._waiting.hold(request)
        return True

    def found(self, request: Request, source: str, num_pages: int) -> None:
        """The first `num_pages` pages of the held `request` can be read from the peer `source`."""
        path = self._waiting.path_of(request)
        hashes = prefix_hashes(path, self._storage.page_size)[:num_pages]
        arrival = self._held[request]
        self._drop_wish(arrival)
        self._unpromise(request)  # an earlier load must not be in the way of this one
        arrival.source, arrival.num_pages, arrival.is_loading = source, len(hashes), False
        records = [PageRecord(page_hash, (), b"") for page_hash in hashes]
        arrival.wish = Wish(request, math.inf, records=records, source=source)
        arrival.num_lacking = arrival.num_pages - self._pages_here(request, arrival)
        if not arrival.num_lacking:
            self.covered(request)
            return
        self._wishes.put_back(arrival.wish)

    def let_go(self, request: Request) -> None:
        """The held `request` has what it gets: the rest is computed here."""
        arrival = self._held.pop(request, None)
        if arrival is None:
            return
        self._drop_wish(arrival)
        self._promise(request)
        self._waiting.let_go(request)

    def ask_to_lend(self, request: Request, source: str) -> None:
        """The peer `source`, which has computed the prompt of the held `request`, is asked to lend
        its pages; `leave_there` or `found` follows."""
        self._held[request].source = source

    def leave_there(self, request: Request) -> None:
        """The pages of the held `request` stay where they are: it waits for its turn, and needs
        none of them here."""
        self._drop_wish(self._held.pop(request))
        self._promised[request] = 0
        self._waiting.let_go(request)

    def hold_again(self, request: Request) -> None:
        """As before `leave_there`."""
        del self._promised[request]
        self._held[request] = _Arrival()
        self._waiting.hold(request)

    def left(self, request: Request) -> None:
        """`request` runs, or has ended."""
        arrival = self._held.pop(request, None)
        if arrival is not None:
            self._drop_wish(arrival)
        self._unpromise(request)

    # What `PageLoads` reports

    def load_begins(self, request: Request, now_s: float) -> None:
        """A load of pages that `request` lacks is ordered."""
        arrival = self._held[request]
        arrival.is_loading = True
        if arrival.first_load_s is None:
            arrival.first_load_s = now_s
        self._promise(request)

    def covered(self, request: Request) -> None:
        """Nothing is to be loaded for the held `request` now."""
        self._held[request].is_loading = False
        self.ended.append(request)

    def cannot_load(self, request: Request) -> None:
        """Nothing can be loaded behind what is cached of the held `request`: it computes the
        rest."""
        self.let_go(request)
        self.ended.append(request)

    def load_ended(self, request: Request, num_pages: int) -> None:
        """A load for `request` is over, which has brought `num_pages` pages."""
        self.counts.loaded_pages += num_pages
        if request in self._held:
            self.covered(request)

    # Queries

    def holds(self, request: Request) -> bool:
        """True if `request` is held here."""
        return request in self._held

    def awaits_prompt(self, request: Request) -> bool:
        """True if the prompt of `request` is being computed elsewhere."""
        arrival = self._held.get(request)
        return arrival is not None and not arrival.source

    def has_all(self, request: Request) -> bool:
        """True if `request` is not held any more, or all its pages that were found are cached."""
        arrival = self._held.get(request)
        return arrival is None or not self._lacks_any(request, arrival)

    def page_hash(self, request: Request, index: int) -> bytes:
        """The hash of a page of the waiting `request`."""
        path = self._waiting.path_of(request)
        return prefix_hashes(path, self._storage.page_size)[index]

    def pages_here(self, request: Request) -> int:
        """Pages of the held `request` that were found and are cached."""
        return self._pages_here(request, self._held[request])

    def first_load_s(self, request: Request) -> float | None:
        """The moment at which a load for the held `request` was first ordered; None if none was."""
        arrival = self._held.get(request)
        return None if arrival is None else arrival.first_load_s

    def room_beside(self, num_available: int) -> int:
        """Pages for new loads, of `num_available` that are free or evictable: each request that
        runs or loads may still grow, and one that loads lacks the end of its prompt. All while
        there is none."""
        assert self._reserved_tokens is not None
        num_growing = self._running.num_growing + len(self._promised)
        if not num_growing:
            return num_available
        tokens = min(
            num_growing * self._reserved_tokens,
            self._running.remaining_output_tokens + self.promised_output_tokens,
        )
        page_size = self._storage.page_size
        growth = max(self._running.num_growing, -(-tokens // page_size))
        return num_available - growth - len(self._promised)

    @property
    def num_held(self) -> int:
        """Requests that are held."""
        return len(self._held)

    @property
    def num_loading(self) -> int:
        """Requests of which pages are on their way."""
        return sum(arrival.is_loading for arrival in self._held.values())

    @property
    def num_found(self) -> int:
        """Requests whose pages can be read, and wait for room."""
        return sum(one.waits_for_room for one in self._held.values())

    @property
    def num_pending_pages(self) -> int:
        """Pages of these requests that were not cached when they were found."""
        return sum(one.num_lacking for one in self._held.values() if one.waits_for_room)

    def progress(self, request: Request) -> str | None:
        """Says in words what the held `request` waits for; None if it is not held."""
        arrival = self._held.get(request)
        if arrival is None:
            return None
        if arrival.wish is None and arrival.source:
            return f"{arrival.source} is asked to keep its pages and to compute its attention"
        if arrival.wish is None:
            return "another server computes its prompt"
        here = self._pages_here(request, arrival)
        pages = f"{here} of the {arrival.num_pages} pages of its prompt are here"
        if arrival.is_loading:
            return f"{pages}, more are loaded from {arrival.source}"
        return f"{pages}, more can be read from {arrival.source} when there is room for them"

    def check_end(self) -> None:
        """Asserts that nothing is held or promised; for tests."""
        assert not self._held and not self._promised and self.promised_output_tokens == 0

    # Inside

    def _pages_here(self, request: Request, arrival: _Arrival) -> int:
        match = self._storage.match(self._waiting.path_of(request))
        return min(match.end // self._storage.page_size, arrival.num_pages)

    def _lacks_any(self, request: Request, arrival: _Arrival) -> bool:
        return self._pages_here(request, arrival) < arrival.num_pages

    def _promise(self, request: Request) -> None:
        if request not in self._promised:
            self._promised[request] = request.stops.max_new_tokens
            self.promised_output_tokens += request.stops.max_new_tokens

    def _unpromise(self, request: Request) -> None:
        self.promised_output_tokens -= self._promised.pop(request, 0)

    @staticmethod
    def _drop_wish(arrival: _Arrival) -> None:
        if arrival.wish is not None:
            arrival.wish.is_dropped = True
            arrival.wish = None
