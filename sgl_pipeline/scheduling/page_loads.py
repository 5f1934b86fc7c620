"""Brings pages that waiting requests want from the store into the pool, ahead of need.

A request that arrives is held until it is known how much of its prefix the store has; then a load
claims the rest of that prefix in the radix tree, as a prefill does, and the request is parked there
with all others that want it. Loaded pages are cached, so they become ordinary hits. Whatever does
not come, or too late, is computed. The look-ahead is CachedAttention's (ATC'24, section 3.3.1):
pages of the first requests of the queue are loaded while others still run.
"""

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from sgl_pipeline.args import ACCOUNTINGS
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.page_record import PageRecord
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.page_hashing import prefix_hashes
from sgl_pipeline.scheduling.radix_demand import RadixDemand
from sgl_pipeline.scheduling.radix_storage import RadixStorage
from sgl_pipeline.scheduling.radix_tree import RadixNode, RadixTree
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.tier_counts import TierCounts
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue
from sgl_pipeline.step_work import StepTimes, StepWork, attended_tokens
from sgl_pipeline.wire.step_order import INT32
from sgl_pipeline.wire.store_orders import LoadPages, PagesLoaded

_ACCOUNTING = ACCOUNTINGS["radix"]
# A load that is declined makes the next one look faster by this.
FORGOTTEN = 0.9
# The newest load's share in the measured time of a page.
NEWEST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Lookup:
    """The question which of `hashes`, from the first on, the store has."""

    number: int
    hashes: tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class _Wish:
    """A waiting request whose prefix may be in the store, behind its first `start` tokens."""

    request: Request
    held_s: float
    start: int = 0
    records: Sequence[PageRecord] = ()

    def __lt__(self, other: "_Wish") -> bool:
        return self.request.order < other.request.order


@dataclass(slots=True, eq=False)
class PageLoad:
    """Pages on their way into the pool: of `tokens` behind the cached `match`, to the end of
    `path`."""

    transfer: int
    request: Request
    match: RadixNode
    path: RadixNode
    tokens: list[int]
    pages: list[int]
    records: Sequence[PageRecord]
    parked_s: float | None = None
    is_claimed: bool = True
    reports: dict[int, PagesLoaded] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of all its pages."""
        return self.path.end - self.match.end


class PageLoads:
    """All that is looked up or on its way.

    Args:
        on_loaded: gets pages that have just been cached, and the end of their prefix.
        broken: gets the hashes of pages whose objects are missing or altered.
    """

    def __init__(
        self,
        tree: RadixTree,
        demand: RadixDemand,
        storage: RadixStorage,
        pages: RequestPages,
        waiting: WaitingQueue,
        counts: TierCounts,
        on_loaded: Callable[[RadixNode, list[int]], None],
        broken: list[bytes],
    ) -> None:
        self._tree, self._demand, self._storage = tree, demand, storage
        self._pages, self._waiting, self._counts = pages, waiting, counts
        self._on_loaded, self._broken = on_loaded, broken
        self._held: deque[_Wish] = deque()  # all that are held, and some that are not any more
        self._new: list[_Wish] = []  # a heap, to be looked up
        self._asked: dict[int, _Wish] = {}
        self._found: list[_Wish] = []  # a heap, to be loaded
        self._loads: dict[int, PageLoad] = {}
        # Pages that were loaded for requests that waited then.
        self._awaited: dict[Request, int] = {}
        self._next_lookup = 0
        self.page_s: float | None = None  # measured seconds of a page on the slowest stage

    # What comes in

    def queued(self, request: Request, rules: TierRules, now_s: float) -> None:
        """`request` has entered the queue: holds it if its prefix may be worth a load."""
        path = self._waiting.path_of(request)
        if path.end - self._storage.match(path).end < rules.least_tokens:
            return
        wish = _Wish(request, now_s)
        self._waiting.hold(request)
        self._held.append(wish)
        heapq.heappush(self._new, wish)

    def take_lookups(self, look_ahead: int) -> list[Lookup]:
        """The next questions for the store, of the requests that are served first; `look_ahead` is
        the rule of that name."""
        lookups: list[Lookup] = []
        while self._new and len(self._asked) + len(self._found) + len(self._loads) < look_ahead:
            wish = heapq.heappop(self._new)
            if wish.request not in self._waiting:
                continue
            path = self._waiting.path_of(wish.request)
            wish.start = self._storage.match(path).end
            hashes = prefix_hashes(path, self._pages.page_size)
            number = self._next_lookup
            self._next_lookup += 1
            self._asked[number] = wish
            lookups.append(Lookup(number, tuple(hashes[wish.start // self._pages.page_size :])))
        self._counts.num_lookups += len(lookups)
        return lookups

    def found(self, number: int, records: Sequence[PageRecord]) -> None:
        """The store's answer: the records of the first pages that were asked for. An answer that
        no request waits for any more has no effect."""
        wish = self._asked.pop(number, None)
        if wish is None:
            return
        self._counts.num_hits += bool(records)
        self._counts.found_tokens += len(records) * self._pages.page_size
        if not records or wish.request not in self._waiting:
            self._waiting.let_go(wish.request)
            return
        wish.records = records
        heapq.heappush(self._found, wish)

    def take(self, report: PagesLoaded, num_stages: int) -> None:
        """A stage has ended a load. Raises ProtocolError for one that it was not ordered."""
        load = self._loads.get(report.transfer)
        if load is None or report.stage in load.reports or report.num_pages > len(load.pages):
            raise ProtocolError(
                f"stage {report.stage} reported load {report.transfer}, which it has reported "
                "before or was never sent"
            )
        load.reports[report.stage] = report
        self._counts.loaded_bytes += report.num_bytes
        self._counts.load_s += report.busy_s
        if len(load.reports) == num_stages:
            del self._loads[report.transfer]
            self._end(load)

    # What goes out

    def next_orders(
        self,
        now_s: float,
        rules: TierRules,
        times: StepTimes | None,
        num_reserved: int,
        owed: Set[int],
        next_transfer: Callable[[], int],
    ) -> Iterator[LoadPages]:
        """Starts loads in the order of the queue, as far as there is room for all that was loaded
        for requests that still wait, too: a load must not evict another one's pages.

        Args:
            num_reserved: available pages that are reserved.
            owed: nothing is loaded behind these pages, which may be forgotten at any time.
        """
        if not self._found:
            return
        most = int(rules.load_share * self._pages.num_pages)
        awaited = self._awaited_pages()
        spare = self._pages.num_available - num_reserved - awaited
        room = min(spare, most - awaited - self.loading_pages)
        blocked: list[_Wish] = []
        while self._found and room > 0:
            wish = heapq.heappop(self._found)
            if wish.request not in self._waiting:
                continue
            path = self._waiting.path_of(wish.request)
            match = self._storage.match(path)
            if self._demand.claimed_node(path) is not None:
                # Parked with it held: it goes on behind what another request or load brings.
                blocked.append(wish)
                continue
            if match.end < wish.start:
                heapq.heappush(self._new, wish)  # evicted since: more is missing than was asked for
                continue
            if min(self._lacking(wish, match), most) > room:
                # It could not be admitted now, nor could those behind it before it.
                blocked.append(wish)
                break
            load = None
            if not owed or owed.isdisjoint(self._storage.pages_of(match)):
                load = self._start(wish, path, rules, times, room)
            self._waiting.let_go(wish.request)
            if load is None:
                continue
            load.transfer = next_transfer()
            self._loads[load.transfer] = load
            room -= len(load.pages)
            yield _order_of(load)
        for wish in blocked:
            heapq.heappush(self._found, wish)

    def give_up_late(self, now_s: float, rules: TierRules) -> None:
        """Requests that have waited for too long compute what has not come."""
        while self._held and now_s - self._held[0].held_s >= rules.patience_s(0):
            self._let_go_late(self._held.popleft(), now_s, rules)
        for wish in self._found:
            self._let_go_late(wish, now_s, rules)
        for load in self._loads.values():
            if load.is_claimed:
                self._give_up_if_late(load, now_s, rules.patience_s(load.num_tokens))

    def _give_up_if_late(self, load: PageLoad, now_s: float, patience_s: float) -> None:
        """The time of a load runs from the moment at which a request is parked for it."""
        if load.parked_s is None and self._has_parked(load):
            load.parked_s = now_s
        if load.parked_s is not None and now_s - load.parked_s >= patience_s:
            self._counts.miss("deadline", load.num_tokens)
            load.is_claimed = False
            self._demand.unclaim(load.path)

    def _let_go_late(self, wish: _Wish, now_s: float, rules: TierRules) -> None:
        """Ends the hold on a request if it has lasted for too long. What is found for it later can
        still be loaded while it waits for its turn."""
        num_tokens = len(wish.records) * self._pages.page_size
        if now_s - wish.held_s >= rules.patience_s(num_tokens):
            self._waiting.let_go(wish.request)

    def cancel(self) -> list[Request]:
        """Forgets all lookups and loads; returns the requests that still wait for them."""
        wishes = (*self._new, *self._asked.values(), *self._found)
        requests = [wish.request for wish in wishes if self._waiting.is_held(wish.request)]
        requests += [load.request for load in self._loads.values()]
        for request in requests:
            self._waiting.let_go(request)
        self._held.clear()
        self._new.clear()
        self._asked.clear()
        self._found.clear()
        self._awaited.clear()
        for load in self._loads.values():
            self._counts.miss("dropped", load.num_tokens)
            if load.is_claimed:
                self._demand.unclaim(load.path)
            self._pages.take_back(load.match, load.pages)
        self._loads.clear()
        return [request for request in requests if request in self._waiting]

    # Queries

    @property
    def loading_pages(self) -> int:
        """Pages on their way."""
        return sum(len(load.pages) for load in self._loads.values())

    @property
    def loading_tokens(self) -> int:
        """Tokens on their way that requests still wait for."""
        return sum(load.num_tokens for load in self._loads.values() if load.is_claimed)

    def load_of(self, node: RadixNode) -> PageLoad | None:
        """The load that brings `node`."""
        for load in self._loads.values():
            above: RadixNode | None = load.path
            while above is not None and above is not node:
                above = above.parent
            if load.is_claimed and above is node:
                return load
        return None

    def load_s(self, num_pages: int) -> float:
        """Predicted seconds of a load behind those on their way; 0 before any was measured."""
        return (self.loading_pages + num_pages) * (self.page_s or 0.0)

    # Inside

    def _awaited_pages(self) -> int:
        """Pages that were loaded for requests that still wait."""
        for request in [one for one in self._awaited if one not in self._waiting]:
            del self._awaited[request]
        return sum(self._awaited.values())

    def _lacking(self, wish: _Wish, match: RadixNode) -> int:
        """Number of pages that were found for `wish` and follow the cached `match`."""
        return max(0, len(wish.records) - (match.end - wish.start) // self._pages.page_size)

    def _start(
        self,
        wish: _Wish,
        path: RadixNode,
        rules: TierRules,
        times: StepTimes | None,
        room: int,
    ) -> PageLoad | None:
        """Begins the load of what `wish` lacks, if it is worth it."""
        size, request = self._pages.page_size, wish.request
        match = self._storage.match(path)
        records = wish.records[len(wish.records) - self._lacking(wish, match) :]
        self._counts.miss("device_covered", (len(wish.records) - len(records)) * size)
        if len(records) * size < rules.least_tokens:
            self._counts.miss("below_threshold", len(records) * size)
            return None
        if self._is_slower(match.end, len(records), times):
            assert self.page_s is not None
            self.page_s *= FORGOTTEN  # so that a slow hour of the store does not last for ever
            self._counts.miss("slower_than_compute", len(records) * size)
            return None
        self._storage.lock(match)
        num_pages = min(len(records), room, self._pages.num_available)
        self._storage.unlock(match)
        self._counts.miss("device_capacity", (len(records) - num_pages) * size)
        if num_pages * size < rules.least_tokens:
            self._counts.miss("device_capacity", num_pages * size)
            return None
        tokens = request.tokens(0, match.end + num_pages * size)
        pages = self._pages.lend(match, num_pages)
        end = self._tree.walk(match, tokens, request.cache_namespace)[-1]
        self._demand.claim_for_load(end)
        return PageLoad(-1, request, match, end, tokens, pages, records[:num_pages])

    def _is_slower(self, start: int, num_pages: int, times: StepTimes | None) -> bool:
        """True if a load takes longer than the computation of all that waits, and of its tokens."""
        if times is None or self.page_s is None:
            return False
        pending = StepWork(
            self._waiting.tokens_to_compute(_ACCOUNTING),
            0,
            0,
            self._waiting.attended_to_compute(_ACCOUNTING),
            0,
        )
        tokens = num_pages * self._pages.page_size
        own = StepWork(tokens, 0, 0, attended_tokens(start, start + tokens), 0)
        compute_ms = times.step_ms(own) + times.step_ms(pending)
        return self.load_s(num_pages) * 1e3 > compute_ms

    def _has_parked(self, load: PageLoad) -> bool:
        node = load.path
        while node is not load.match and node.parent is not None:
            if node.parked:
                return True
            node = node.parent
        return False

    def _end(self, load: PageLoad) -> None:
        """All stages have reported: caches the pages that all of them have."""
        size = self._pages.page_size
        num_pages = min(report.num_pages for report in load.reports.values())
        for report in load.reports.values():
            if report.is_broken and report.num_pages < len(load.records):
                self._broken.append(load.records[report.num_pages].page_hash)
                self._counts.num_broken_pages += 1
        slowest_s = max(report.busy_s for report in load.reports.values())
        if num_pages:
            page_s = slowest_s / num_pages
            before = page_s if self.page_s is None else self.page_s
            self.page_s = before + NEWEST_SHARE * (page_s - before)
        num_tokens = num_pages * size
        good, rest = load.pages[:num_pages], load.pages[num_pages:]
        self._counts.loaded_tokens += num_tokens
        self._counts.miss("storage_transfer", load.num_tokens - num_tokens)
        tokens = load.tokens[: load.match.end + num_tokens]
        end = self._pages.cache_loaded(load.match, tokens, good, rest, load.request.cache_namespace)
        self._on_loaded(end, good)
        if load.is_claimed:
            self._demand.unclaim(load.path)
        if load.request in self._waiting:
            self._awaited[load.request] = num_pages
            if not load.request.num_retractions:
                load.request.loaded_tokens += num_tokens


def _order_of(load: PageLoad) -> LoadPages:
    return LoadPages(
        load.transfer,
        array(INT32, load.pages).tobytes(),
        b"".join(record.page_hash for record in load.records),
        b"".join(record.checksums for record in load.records),
        tuple(record.cuts for record in load.records),
    )
