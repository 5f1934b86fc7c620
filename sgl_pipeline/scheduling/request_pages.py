"""The KV pages and the state slot that each running request holds, and the way of pages to and from
the radix cache.

A page that was given to a request stays the same until the request is released, because orders to
the stages contain new pages only: where the cache already has an equal page, the request keeps its
own and frees it at the end.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass

from sgl_pipeline.microbatch import Chunk, StateSnapshot
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.page_pool import PagePool
from sgl_pipeline.scheduling.radix_demand import RadixDemand
from sgl_pipeline.scheduling.radix_storage import RadixStorage
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.state_slots import StateSlots
from sgl_pipeline.scheduling.state_snapshots import StateSnapshots


@dataclass(slots=True)
class _Holding:
    """`request.pages[:num_cached]` are the cache's, under the lock on `locked`; the rest its own.

    `claimed_path` is the prefix that it prefills below `claimed_below` and others may wait for;
    None when it is done.
    """

    locked: RadixNode
    num_cached: int
    claimed_path: RadixNode | None
    claimed_below: RadixNode


class RequestPages:
    """The pool, the cache, and what running requests hold of the pool and of `state_slots`. Counts
    are in pages. With `snapshots`, of a model with states, pages are cached up to a snapshot only.
    """

    def __init__(
        self,
        pool: PagePool,
        storage: RadixStorage,
        demand: RadixDemand,
        state_slots: StateSlots,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.state_slots = state_slots
        self.snapshots = snapshots
        self._pool = pool
        self.storage = storage
        self._demand = demand
        self._page_size = storage.page_size
        self._holdings: dict[Request, _Holding] = {}
        self._released: list[Request] = []
        self._num_lent = 0

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_size

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._pool.num_pages

    @property
    def num_free(self) -> int:
        """Pages held by no request and not by the cache."""
        return self._pool.num_free

    @property
    def num_available(self) -> int:
        """Pages that are free, or cached and not locked."""
        return self._pool.num_free + self.storage.evictable_pages

    def pages_in_use(self) -> list[int]:
        """Pages that hold anything, cached or of a request; looks at all."""
        return self._pool.pages_in_use()

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def pages_of(self, request: Request, num_tokens: int) -> int:
        """Pages that the request has here for its first `num_tokens` tokens: one in all if it has a
        lease, for the rows of its steps."""
        return self.pages_for(num_tokens) if request.lease is None else 1

    def fits(self, request: Request, path: RadixNode, num_reserved: int) -> bool:
        """True if `try_open` would succeed now."""
        match = self.storage.match(path)
        self.storage.lock(match)
        fits = self._fits_beside(match, request, num_reserved)
        self._unlock(match)
        return fits

    def missing_pages(self, request: Request, path: RadixNode) -> int:
        """Pages that the whole prefill of a waiting request needs beside its cached prefix."""
        num_pages = self.pages_of(request, request.prefill_end)
        return num_pages - self.storage.match(path).end // self._page_size

    def prefilling(self, node: RadixNode) -> Request | None:
        """A running request that prefills `node` for others to wait for; looks at all of them."""
        for request, holding in self._holdings.items():
            above = holding.claimed_path
            while above is not None and above is not holding.claimed_below:
                if above is node:
                    return request
                above = above.parent
        return None

    def try_open(self, request: Request, path: RadixNode, num_reserved: int) -> bool:
        """Gives a waiting request its cached prefix and its state slot, if one is free and its
        whole prefill fits beside that prefix.

        Args:
            path: the prefix that the request wanted from the cache; claimed for it when it is
                admitted.
            num_reserved: available pages that are reserved.
        """
        match = self.storage.match(path)
        self.storage.lock(match)
        if not self._fits_beside(match, request, num_reserved):
            self._unlock(match)
            return False
        self._demand.claim(path, match)
        if self.snapshots is None:
            self.state_slots.give(request)
        else:
            self.snapshots.open(request, path, match)
        self._holdings[request] = _Holding(match, match.end // self._page_size, path, match)
        request.pages = self.storage.pages_of(match)
        request.num_scheduled = request.num_computed = max(match.end, request.leased_tokens)
        return True

    def _fits_beside(self, match: RadixNode, request: Request, num_reserved: int) -> bool:
        """`match`, the request's cached prefix, is locked: its pages are not available."""
        if self.state_slots.are_taken:
            return False
        num_missing = self.pages_of(request, request.prefill_end) - match.end // self._page_size
        return num_missing <= self.num_available - num_reserved

    def reachable_tokens(self, request: Request) -> int:
        """Number of tokens that the request could hold if it took every available page."""
        num_pages = len(request.pages) + self.num_available
        if request.lease is not None:
            return request.num_tokens if num_pages else 0
        return num_pages * self._page_size

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Allocates pages for the first `num_tokens` tokens; False if too few are left."""
        count = self.pages_of(request, num_tokens) - len(request.pages)
        if count <= 0:
            return True
        if count > self.num_available:
            return False
        self._pool.free(self.storage.evict(count - self._pool.num_free))
        request.pages += self._pool.allocate(count)
        return True

    def states_of_chunk(
        self, request: Request, start: int, end: int
    ) -> tuple[int | None, tuple[StateSnapshot, ...]]:
        """`Chunk.state_source` and `Chunk.snapshots` of the next chunk of a prefill, from `start`
        to `end`."""
        if self.snapshots is None:
            return None, ()
        holding = self._holdings[request]
        return self.snapshots.of_chunk(
            request, holding.claimed_path, holding.claimed_below, start, end
        )

    def leave_state(self, request: Request) -> int | None:
        """`Chunk.state_source` of the next decode, which begins where it may leave a snapshot."""
        assert self.snapshots is not None
        return self.snapshots.leave_behind(request, self._holdings[request].locked)

    def commit(self, request: Request) -> None:
        """Makes the full pages matchable whose tokens every stage has computed.

        If the cache has such pages from another request, nothing happens: locking them beside the
        request's own would take twice the room that the request was admitted for.
        """
        if request.lease is not None:
            return
        holding = self._holdings[request]
        num_computed = request.num_computed
        if self.snapshots is not None:
            num_computed = self.snapshots.come_back(request)
        num_full = num_computed // self._page_size
        tokens = request.tokens(0, num_full * self._page_size)
        namespace = request.cache_namespace
        if self.storage.accepts(holding.locked, tokens, namespace):
            self._cache_pages(request, holding, tokens)
        if self.snapshots is not None and holding.claimed_path is not None:
            self.snapshots.attach(request, holding.claimed_path)
            holding.claimed_below = self.snapshots.advance(
                holding.claimed_path, holding.claimed_below, request.num_computed
            )

    def _cache_pages(self, request: Request, holding: _Holding, tokens: list[int]) -> None:
        """Caches the pages of the prefix `tokens`, none of which the cache declines."""
        num_full = len(tokens) // self._page_size
        namespace = request.cache_namespace
        pages = request.pages[holding.num_cached : num_full]
        insertion = self.storage.insert(holding.locked, tokens, pages, namespace)
        assert not insertion.declined
        self.storage.lock(insertion.node)
        self._unlock(holding.locked)
        holding.locked = insertion.node
        holding.num_cached = num_full

    def end_prefill(self, request: Request) -> None:
        """No more prompt pages will come from this request: requests that wait for them may go
        on."""
        holding = self._holdings[request]
        if holding.claimed_path is not None:
            self._demand.unclaim(holding.claimed_path, holding.claimed_below)
            holding.claimed_path = None

    def release(self, request: Request) -> RadixNode:
        """Takes all its pages and its state slot back; the request has no step in flight. Returns
        the end of what is cached of it, which may be evicted."""
        assert request.steps_in_flight == 0
        self.end_prefill(request)
        holding = self._holdings.pop(request)
        num_full = self._cacheable_pages(request, holding)
        insertion = self.storage.insert(
            holding.locked,
            request.tokens(0, num_full * self._page_size),
            request.pages[holding.num_cached : num_full],
            request.cache_namespace,
        )
        if self.snapshots is not None:
            self.snapshots.attach(request, insertion.node)
            self.snapshots.close(request)
        else:
            self.state_slots.take_back(request)
        self._unlock(holding.locked)
        self._pool.free(insertion.declined)
        self._pool.free(request.pages[num_full:])
        request.pages = []
        self._released.append(request)
        return insertion.node

    def _cacheable_pages(self, request: Request, holding: _Holding) -> int:
        """Pages of a request without steps in flight that are of use to others, from the first on,
        those included that are cached already."""
        if request.lease is not None:
            return 0
        if self.snapshots is None:
            return request.num_computed // self._page_size
        return max(holding.num_cached, self.snapshots.settle(request) // self._page_size)

    def _unlock(self, node: RadixNode) -> None:
        self._pool.free(self.storage.unlock(node))

    # Pages out of use, or that a load fills

    def take_out(self, num_pages: int) -> list[int]:
        """Takes `num_pages` available pages out of use."""
        self._pool.free(self.storage.evict(num_pages - self._pool.num_free))
        self._num_lent += num_pages
        return self._pool.allocate(num_pages)

    def put_back(self, pages: list[int]) -> None:
        """Takes back pages of `take_out`; what they hold is of no use."""
        self._pool.free(pages)
        self._num_lent -= len(pages)

    def lend(self, match: RadixNode, num_pages: int) -> list[int]:
        """Takes `num_pages` available pages out of use, to be filled behind the cached `match`,
        which stays cached meanwhile."""
        self.storage.lock(match)
        return self.take_out(num_pages)

    def take_back(self, match: RadixNode, pages: list[int]) -> None:
        """Takes back pages that `lend` gave out for `match`; what they hold is of no use."""
        self._unlock(match)
        self.put_back(pages)

    def cache_loaded(
        self,
        match: RadixNode,
        tokens: list[int],
        good: list[int],
        rest: list[int],
        namespace: str,
    ) -> RadixNode:
        """Takes back all pages that `lend` gave out for `match`: `good` hold what follows it of
        `tokens` and become matchable, the `rest` is of no use. Returns the end of the prefix."""
        insertion = self.storage.insert(match, tokens, good, namespace)
        self._unlock(match)
        self._pool.free((*insertion.declined, *rest))
        self._num_lent -= len(good) + len(rest)
        return insertion.node

    def hit_of(self, request: Request) -> RadixNode:
        """The end of the cached prefix that a running request uses."""
        return self._holdings[request].locked

    def take_released(self) -> tuple[Request, ...]:
        """The requests released since the last call, for the stages to forget."""
        released = tuple(self._released)
        self._released.clear()
        return released

    def clear_cache(self) -> None:
        """Frees every cached page that is not locked."""
        self._pool.free(self.storage.evict(self.storage.evictable_pages))

    def resize(self, num_pages: int) -> None:
        """Changes the pool's size to `num_pages` pages; none is held or cached."""
        assert self._pool.num_free == self._pool.num_pages, "pages are in use"
        self._pool.resize(num_pages)

    def drop_cached(self, lost: Container[int]) -> None:
        """Frees every cached prefix from its first page in `lost` on; no request holds any."""
        self._pool.free(self.storage.drop(lost))

    def check_conservation(self) -> None:
        """Asserts that every page is free, cached, or held by exactly one request, as every state
        slot is, and that no page can be matched before every stage has computed it."""
        if self.snapshots is None:
            self.state_slots.check_owners(self._holdings)
        else:
            self.snapshots.check(self._holdings)
        held: list[int] = []
        for request, holding in self._holdings.items():
            held += request.pages[holding.num_cached :]
            assert holding.num_cached <= request.num_computed // self._page_size
        assert len(held) == len(set(held)), "two requests hold the same page"
        counts = (self._pool.num_free, len(held), self.storage.cached_pages, self._num_lent)
        assert sum(counts) == self._pool.num_pages, (
            f"free, held, cached, lent = {counts} of {self._pool.num_pages} pages"
        )

    def check_chunks(self, in_flight: Iterable[Chunk]) -> None:
        """Asserts that requests have the pages that they have begun to fill, and chunks in flight
        those that they write."""
        for request in self._holdings:
            num_begun = self.pages_of(request, request.num_scheduled)
            assert num_begun <= len(request.pages) or request.num_scheduled == request.leased_tokens
        for chunk in in_flight:
            assert len(chunk.request.pages) >= self.pages_of(chunk.request, chunk.end)
