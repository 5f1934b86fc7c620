"""Loads of pages from the store into the pool, for requests that wait for them.

A load claims the rest of a request's prefix in the radix tree, as a prefill does, and the request
is parked there with all others that want it. Loaded pages are cached, so they become ordinary hits.
Whatever does not come, or too late, is computed. What is to be loaded is in `page_wishes.py`.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.page_record import PageRecord
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.arrivals_from_peers import ArrivalsFromPeers
from sgl_pipeline.scheduling.load_pace import LoadPace
from sgl_pipeline.scheduling.page_wishes import PageWishes, Wish
from sgl_pipeline.scheduling.radix_demand import RadixDemand
from sgl_pipeline.scheduling.radix_storage import RadixStorage
from sgl_pipeline.scheduling.radix_tree import RadixNode, RadixTree
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.tier_counts import TierCounts
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue
from sgl_pipeline.step_work import StepTimes
from sgl_pipeline.wire.step_order import INT32
from sgl_pipeline.wire.store_orders import EndLoad, LoadPages, PagesLoaded


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
    source: str = ""  # the peer that they come from
    parked_s: float | None = None
    is_claimed: bool = True
    is_ending: bool = False
    reports: dict[int, PagesLoaded] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of all its pages."""
        return self.path.end - self.match.end


class PageLoads:
    """All that is on its way.

    Args:
        on_loaded: gets a load whose good pages have just been cached, the end of their prefix, and
            these pages.
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
        on_loaded: Callable[[PageLoad, RadixNode, list[int]], None],
        broken: list[bytes],
        wishes: PageWishes,
        arrivals: ArrivalsFromPeers,
    ) -> None:
        self._tree, self._demand, self._storage = tree, demand, storage
        self._pages, self._waiting, self._counts = pages, waiting, counts
        self._on_loaded, self._broken = on_loaded, broken
        self._wishes, self._arrivals = wishes, arrivals
        self._loads: dict[int, PageLoad] = {}
        # Pages that were loaded for requests that waited then.
        self._awaited: dict[Request, int] = {}
        self._pace = LoadPace(waiting, pages.page_size)

    def take(self, report: PagesLoaded, num_stages: int) -> None:
        """A stage has ended a load. Raises ProtocolError for one that it was not ordered."""
        load = self._loads.get(report.transfer)
        if load is None or report.stage in load.reports or report.num_pages > len(load.pages):
            raise ProtocolError(
                f"stage {report.stage} reported load {report.transfer}, which it has reported "
                "before or was never sent"
            )
        load.reports[report.stage] = report
        counts = self._arrivals.counts if load.source else self._counts
        counts.loaded_bytes += report.num_bytes
        counts.load_s += report.busy_s
        if load.source and report.message:
            self._arrivals.counts.last_message = report.message
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
        for requests that still wait, too: a load must not evict another one's pages. Loads from
        peers are whole, leave what running requests are expected to need, and come after requests
        that were retracted.

        Args:
            num_reserved: available pages that are reserved.
            owed: nothing is loaded behind these pages, which may be forgotten at any time.
        """
        if not self._wishes.has_found:
            return
        most = int(rules.load_share * self._pages.num_pages)
        awaited = self._awaited_pages()
        spare = self._pages.num_available - num_reserved - awaited
        room = min(spare, most - awaited - self.loading_pages)
        blocked: list[Wish] = []
        while spare > 0 and (found := self._pop_loadable(blocked)) is not None:
            wish, path, match = found
            num_lacking = len(wish.lacking(match, self._pages.page_size))
            if wish.source:
                has_room = self._has_room_for_prompt(wish, path, match, awaited)
            else:
                has_room = min(num_lacking, most) <= room
            if num_lacking and not has_room:
                # It could not be admitted now, nor could those behind it before it.
                blocked.append(wish)
                break
            is_owed = bool(owed) and not owed.isdisjoint(self._storage.pages_of(match))
            if wish.source:
                load = self._start_from_peer(wish, match, now_s, is_owed=is_owed)
            else:
                load = self._start_from_store(
                    wish, match, rules, times, max(0, room), is_owed=is_owed
                )
                self._waiting.let_go(wish.request)
            if load is None:
                continue
            load.transfer = next_transfer()
            self._loads[load.transfer] = load
            spare -= len(load.pages)
            room -= len(load.pages)
            yield _order_of(load)
        for wish in blocked:
            self._wishes.put_back(wish)

    def _pop_loadable(self, blocked: list[Wish]) -> tuple[Wish, RadixNode, RadixNode] | None:
        """The next found wish that can be loaded, the node of its prefix, and what is cached of
        that; appends those that must wait to `blocked`. None if there is none."""
        while (wish := self._wishes.pop_found()) is not None:
            path = self._waiting.path_of(wish.request)
            match = self._storage.match(path)
            if self._demand.claimed_node(path) is not None:
                # Parked with it held: it goes on behind what another request or load brings.
                blocked.append(wish)
            elif match.end < wish.start:
                self._wishes.ask_again(wish)  # evicted since: more is missing than was asked for
            else:
                return wish, path, match
        return None

    def give_up_late(self, now_s: float, rules: TierRules) -> None:
        """Requests that are parked for a load for too long compute what has not come."""
        for load in self._loads.values():
            if load.is_claimed and not load.source:
                self._give_up_if_late(load, now_s, rules.patience_s(load.num_tokens))

    def _give_up_if_late(self, load: PageLoad, now_s: float, patience_s: float) -> None:
        """The time of a load runs from the moment at which a request is parked for it."""
        if load.parked_s is None and self._has_parked(load):
            load.parked_s = now_s
        if load.parked_s is not None and now_s - load.parked_s >= patience_s:
            self._counts.miss("deadline", load.num_tokens)
            load.is_claimed = False
            self._demand.unclaim(load.path)

    def end_orphans(self) -> Iterator[EndLoad]:
        """Ends loads from peers for requests that are not held for them any more. Their pages are
        withdrawn, so most fall short by themselves; one that hangs would keep its pages."""
        for load in self._loads.values():
            if load.source and not load.is_ending and not self._arrivals.holds(load.request):
                load.is_ending = True
                yield EndLoad(load.transfer)

    def cancel(self) -> list[Request]:
        """Forgets all loads; returns the requests that still wait for them."""
        requests = [load.request for load in self._loads.values()]
        self._awaited.clear()
        for load in self._loads.values():
            if not load.source:
                self._counts.miss("dropped", load.num_tokens)
            if load.is_claimed:
                self._demand.unclaim(load.path)
            self._pages.take_back(load.match, load.pages)
        self._loads.clear()
        return [request for request in requests if request in self._waiting]

    # Queries

    @property
    def num_under_way(self) -> int:
        """Loads on their way."""
        return len(self._loads)

    @property
    def loading_pages(self) -> int:
        """Pages on their way."""
        return sum(len(load.pages) for load in self._loads.values())

    @property
    def promised_pages(self) -> int:
        """Pages on their way from peers."""
        return sum(len(load.pages) for load in self._loads.values() if load.source)

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
        return self._pace.load_s(self.loading_pages + num_pages)

    # Inside

    def _awaited_pages(self) -> int:
        """Pages that were loaded for requests that still wait. Those of a prompt that has not come
        whole may be evicted: else two that lack some would wait for each other."""
        for request in [one for one in self._awaited if one not in self._waiting]:
            del self._awaited[request]
        held = self._arrivals.holds
        return sum(num_pages for one, num_pages in self._awaited.items() if not held(one))

    def _start_from_store(
        self,
        wish: Wish,
        match: RadixNode,
        rules: TierRules,
        times: StepTimes | None,
        room: int,
        *,
        is_owed: bool,
    ) -> PageLoad | None:
        """Begins the load of what `wish` lacks behind `match`, if it is worth it.

        Args:
            room: most pages.
            is_owed: the pages of `match` may be forgotten at any time.
        """
        size = self._pages.page_size
        records = wish.lacking(match, size)
        if is_owed:
            self._counts.miss("owed", len(records) * size)
            return None
        self._counts.miss("device_covered", (len(wish.records) - len(records)) * size)
        if len(records) * size < rules.least_tokens:
            self._counts.miss("below_threshold", len(records) * size)
            return None
        if self._pace.declines(match.end, len(records), self.load_s(len(records)), times):
            self._counts.miss("slower_than_compute", len(records) * size)
            return None
        self._storage.lock(match)
        num_pages = min(len(records), room, self._pages.num_available)
        self._storage.unlock(match)
        self._counts.miss("device_capacity", (len(records) - num_pages) * size)
        if num_pages * size < rules.least_tokens:
            self._counts.miss("device_capacity", num_pages * size)
            return None
        return self._claim(wish, match, records[:num_pages])

    def _claim(self, wish: Wish, match: RadixNode, records: Sequence[PageRecord]) -> PageLoad:
        """Begins the load of `records`, which follow `match`; there is room for them."""
        request, num_pages = wish.request, len(records)
        tokens = request.tokens(0, match.end + num_pages * self._pages.page_size)
        pages = self._pages.lend(match, num_pages)
        end = self._tree.walk(match, tokens, request.cache_namespace)[-1]
        self._demand.claim_for_load(end)
        return PageLoad(-1, request, match, end, tokens, pages, records, wish.source)

    # Of prompts that other servers have computed

    def _has_room_for_prompt(
        self, wish: Wish, path: RadixNode, match: RadixNode, awaited: int
    ) -> bool:
        """True if the request of `wish` could run at once with all that it lacks behind `match`."""
        head = self._waiting.head()
        if head is not None and head.num_retractions and head.order < wish.request.order:
            return False
        self._storage.lock(match)
        num_available = self._pages.num_available - awaited
        self._storage.unlock(match)
        num_missing = self._pages.missing_pages(wish.request, path)
        return num_missing <= self._arrivals.room_beside(num_available)

    def _start_from_peer(
        self, wish: Wish, match: RadixNode, now_s: float, *, is_owed: bool
    ) -> PageLoad | None:
        """Begins the load of all that `wish` lacks, if that is anything.

        Args:
            is_owed: the pages of `match` may be forgotten at any time.
        """
        records = wish.lacking(match, self._pages.page_size)
        if is_owed:
            self._arrivals.cannot_load(wish.request)
            return None
        if not records:
            self._arrivals.covered(wish.request)
            return None
        self._arrivals.load_begins(wish.request, now_s)
        return self._claim(wish, match, records)

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
        num_tokens = num_pages * size
        if not load.source:
            self._note_store_load(load, num_pages)
        good, rest = load.pages[:num_pages], load.pages[num_pages:]
        tokens = load.tokens[: load.match.end + num_tokens]
        end = self._pages.cache_loaded(load.match, tokens, good, rest, load.request.cache_namespace)
        self._on_loaded(load, end, good)
        if load.is_claimed:
            self._demand.unclaim(load.path)
        if load.request in self._waiting:
            # Those of its earlier loads are still awaited.
            self._awaited[load.request] = self._awaited.get(load.request, 0) + num_pages
            if not load.source and not load.request.num_retractions:
                load.request.loaded_tokens += num_tokens
        if load.source:
            self._arrivals.load_ended(load.request, num_pages)

    def _note_store_load(self, load: PageLoad, num_pages: int) -> None:
        """The store has brought the first `num_pages` pages of `load`."""
        size = self._pages.page_size
        for report in load.reports.values():
            if report.is_broken and report.num_pages < len(load.records):
                self._broken.append(load.records[report.num_pages].page_hash)
                self._counts.num_broken_pages += 1
        if num_pages:
            slowest_s = max(report.busy_s for report in load.reports.values())
            self._pace.measured(num_pages, slowest_s)
        self._counts.loaded_tokens += num_pages * size
        self._counts.miss("storage_transfer", load.num_tokens - num_pages * size)


def _order_of(load: PageLoad) -> LoadPages:
    return LoadPages(
        load.transfer,
        array(INT32, load.pages).tobytes(),
        b"".join(record.page_hash for record in load.records),
        b"".join(record.checksums for record in load.records),
        () if load.source else tuple(record.cuts for record in load.records),
        load.source,
        _offer_of(load),
    )


def _offer_of(load: PageLoad) -> int:
    """The number of the peer's offer; 0 where a store has the pages."""
    if not load.source:
        return 0
    assert load.request.room is not None
    return load.request.room.number
