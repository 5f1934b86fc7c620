"""The prefixes that have KV pages, and the order in which they may be evicted.

`RequestPages` finds hits here, locks what it uses, hands over computed pages and asks for room.
Only this file and `page_run.py` know where pages lie: all are in the stages' pool. It never frees a
page: it returns to its caller what it evicts or declines.

After SGLang's `mem_cache/radix_cache.py`, which it equals in match lengths and in locked and
evictable sizes; it differs in evicting single pages from a leaf's tail instead of whole leaves.
"""

import heapq
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Protocol

from sgl_pipeline.scheduling.page_run import PageRun
from sgl_pipeline.scheduling.radix_demand import RadixDemand
from sgl_pipeline.scheduling.radix_tree import RadixNode, RadixTree

# Leaves that one call of `evict` spares because waiting requests want them.
MAX_SPARED = 64


class StorageWatch(Protocol):
    """Hears which nodes get pages and lose them."""

    def on_cached(self, node: RadixNode) -> None:
        """`node` has just been cached."""

    def on_evicted(self, node: RadixNode, run: PageRun) -> None:
        """`node` is about to lose `run`."""


@dataclass(frozen=True, slots=True)
class Insertion:
    """`node` ends the inserted prefix; the places of `declined` pages were already taken."""

    node: RadixNode
    declined: list[int]


class RadixStorage:
    """Keeps the page runs of `tree`, and reports to `demand` what it caches and evicts.

    A node's run has one page for every `page_size` of its tokens. `locked_pages` are under at least
    one lock, `evictable_pages` are all others. Every node that may be evicted has an entry in the
    eviction heap, which is at most as recent as the node's last use.

    With `spares_wanted`, leaves that waiting requests want are evicted last (CachedAttention's
    eviction window, ATC'24, section 3.3.2): coming up for eviction counts as a use of them.
    """

    def __init__(self, tree: RadixTree, demand: RadixDemand) -> None:
        self.page_size = tree.page_size
        self.evictable_pages = 0
        self.locked_pages = 0
        self._tree = tree
        self._demand = demand
        self.spares_wanted = False
        self.watch: StorageWatch | None = None
        self._heap_entries = 0
        self._eviction_heap: list[tuple[int, int, RadixNode]] = []

    @property
    def cached_pages(self) -> int:
        return self.evictable_pages + self.locked_pages

    def match(self, path: RadixNode) -> RadixNode:
        """The last cached node of a path: `.end` tokens of it are cached."""
        return path.last_cached

    def pages_of(self, node: RadixNode) -> list[int]:
        """The pages of the whole prefix that ends with the cached `node`, in token order."""
        runs = []
        while node.parent is not None:
            assert node.run is not None
            runs.append(node.run.pages)
            node = node.parent
        return [page for pages in reversed(runs) for page in pages]

    def accepts(self, below: RadixNode, tokens: list[int], namespace: str = "") -> bool:
        """True if there is a page of `tokens` after `below`, and `insert` would decline none of
        them.

        The first page decides: if it is not cached, no page behind it is.
        """
        if not self._tree.enabled or len(tokens) < below.end + self.page_size:
            return False
        child = self._tree.child_along(below, tokens, namespace)
        return child is None or not child.is_cached

    def insert(
        self, below: RadixNode, tokens: list[int], pages: list[int], namespace: str = ""
    ) -> Insertion:
        """Caches `pages`, which hold the KV of `tokens` from position `below.end` on.

        Args:
            below: a cached node that cannot be evicted now: locked, or the root.
            tokens: the whole prefix from position 0, at least to the end of `pages`.
            pages: page ids that the cache owns from now on, except those it declines.
            namespace: as given to `RadixDemand.want`.
        """
        if not self._tree.enabled:
            return Insertion(self._tree.root, pages)
        tokens = tokens[: below.end + len(pages) * self.page_size]
        declined: list[int] = []
        node, start = below, 0
        for node in self._tree.walk(below, tokens, namespace):
            end = start + len(node.tokens) // self.page_size
            if node.is_cached:
                declined += pages[start:end]
            else:
                self._fill(node, pages[start:end])
            start = end
        return Insertion(node, declined)

    def lock(self, node: RadixNode) -> None:
        """Keeps the prefix that ends with the cached `node` from being evicted."""
        while node.parent is not None:
            run = node.run
            assert run is not None
            if run.lock_count == 0:
                self.evictable_pages -= len(run.pages)
                self.locked_pages += len(run.pages)
            run.lock_count += 1
            node = node.parent

    def unlock(self, node: RadixNode) -> list[int]:
        """Takes back one `lock`; its end counts as a use (its start need not: nothing could be
        evicted). Returns the pages that are of no use from now on, none in models without states.
        """
        use = self._tree.next_use()
        while node.parent is not None:
            run = node.run
            assert run is not None
            run.lock_count -= 1
            node.last_used = use
            if run.lock_count == 0:
                self.evictable_pages += len(run.pages)
                self.locked_pages -= len(run.pages)
                self._offer_for_eviction(node)
            node = node.parent
        return []

    def evict(self, num_pages: int) -> list[int]:
        """Drops up to `num_pages` unlocked pages, least recently used leaf first, from its tail.

        Returns the page ids; fewer than asked only when nothing evictable is left.
        """
        evicted: list[int] = []
        num_spared = 0
        while len(evicted) < num_pages and self._eviction_heap:
            used, _, node = heapq.heappop(self._eviction_heap)
            run = node.run
            if run is None:
                continue
            run.is_offered = False
            if self.spares_wanted and node.num_waiting and num_spared < MAX_SPARED:
                num_spared += 1
                node.last_used = self._tree.next_use()
            if node.last_used != used:
                self._offer_for_eviction(node)
                continue
            if not is_evictable(node):
                continue
            evicted += self._evict_tail(node, num_pages - len(evicted))
        return evicted

    def _evict_tail(self, node: RadixNode, num_pages: int) -> list[int]:
        """Drops up to `num_pages` pages from the tail of an evictable node; returns them."""
        assert node.run is not None
        kept = len(node.run.pages) - num_pages
        if kept > 0:
            self._tree.split(node, kept * self.page_size)
        return self._drop_run(node)

    def cached_nodes(self) -> Iterator[RadixNode]:
        """All nodes that have pages, parents first."""
        nodes = list(self._cached_children(self._tree.root))
        while nodes:
            node = nodes.pop()
            nodes += self._cached_children(node)
            yield node

    def next_evicted(self, num_nodes: int) -> list[RadixNode]:
        """The cached nodes that come up for eviction next, about in order; looks at all of them."""
        first = heapq.nsmallest(num_nodes, self._eviction_heap)
        return [node for _, _, node in first if is_evictable(node)]

    def drop(self, lost: Container[int]) -> list[int]:
        """Drops each cached prefix from its first page in `lost` on; none of these pages is locked.

        Returns the page ids.
        """
        doomed: list[RadixNode] = []
        whole = list(self._cached_children(self._tree.root))
        while whole:
            node = whole.pop()
            assert node.run is not None
            places = (place for place, page in enumerate(node.run.pages) if page in lost)
            first = next(places, None)
            if first is None:
                whole += self._cached_children(node)
                continue
            if first:
                self._tree.split(node, first * self.page_size)
            doomed.append(node)
        for node in doomed:
            doomed += self._cached_children(node)
        dropped = [page for node in reversed(doomed) for page in self._drop_run(node)]
        self._eviction_heap = [one for one in self._eviction_heap if one[2].run is not None]
        heapq.heapify(self._eviction_heap)
        return dropped

    @staticmethod
    def _cached_children(node: RadixNode) -> Iterator[RadixNode]:
        return (child for child in node.children.values() if child.is_cached)

    def _fill(self, node: RadixNode, pages: list[int]) -> None:
        """Gives `node`, whose parent is cached, its pages."""
        assert node.parent is not None and node.parent.run is not None
        node.run = PageRun(pages)
        node.parent.run.num_cached_children += 1
        self.evictable_pages += len(pages)
        self._demand.on_cached(node)
        if self.watch is not None:
            self.watch.on_cached(node)
        self._offer_for_eviction(node)

    def _drop_run(self, node: RadixNode) -> list[int]:
        """Takes its pages from `node`, which is evictable."""
        run, parent = node.run, node.parent
        assert run is not None and parent is not None and parent.run is not None
        if self.watch is not None:
            self.watch.on_evicted(node, run)
        node.run = None
        parent.run.num_cached_children -= 1
        self.evictable_pages -= len(run.pages)
        self._demand.on_evicted(node)
        self._tree.prune(node)
        self._offer_for_eviction(parent)
        return run.pages

    def _offer_for_eviction(self, node: RadixNode) -> None:
        """Enters `node` in the heap if it may be evicted. Entries are checked when they come out:
        each is at most as recent as its node, so the first current one is least recently used."""
        if is_evictable(node) and node.run is not None and not node.run.is_offered:
            node.run.is_offered = True
            self._heap_entries += 1
            heapq.heappush(self._eviction_heap, (node.last_used, self._heap_entries, node))


def is_evictable(node: RadixNode) -> bool:
    """True if the node has pages that no request uses and that no cached prefix continues."""
    run = node.run
    return (
        run is not None
        and node.parent is not None
        and run.lock_count == 0
        and run.num_cached_children == 0
    )
