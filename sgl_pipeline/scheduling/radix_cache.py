"""The radix tree over token prefixes: which have KV pages, and which of those without are wanted.

`RequestPages` keeps computed pages here, `WaitingQueue` registers what its requests want, so that
one walk at arrival replaces matching the queue again and again: a request's hit is the cached part
of its path, current at any time. The cache never frees a page: what it evicts or declines it gives
back to the caller. LRU order comes from a counter, not from a clock.

After SGLang's `mem_cache/radix_cache.py`, which it equals in match lengths and in locked and
evictable sizes; it differs in evicting single pages from a leaf's tail instead of whole leaves.
"""

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field

from sgl_pipeline.requests import Request


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of tokens, a whole number of pages long, that continues its parent's prefix.

    It is cached when it has `pages`; then its parent is cached as well. Without pages it lives only
    while some waiting or prefilling request's path goes through it. The end of a path or of a match
    is always the end of a node: a split keeps the object for the lower half.
    """

    parent: "RadixNode | None"
    key: Hashable  # its place in `parent.children`
    tokens: list[int]
    end: int  # tokens from the root to this node's end
    pages: list[int] | None = None
    children: dict[Hashable, "RadixNode"] = field(default_factory=dict)
    num_cached_children: int = 0
    lock_count: int = 0
    last_used: int = 0
    in_eviction_heap: bool = False
    num_waiting: int = 0
    num_prefilling: int = 0
    # Waiting requests that hold still until a prefilling one has committed this node's pages.
    parked: list[Request] = field(default_factory=list)

    @property
    def is_cached(self) -> bool:
        return self.pages is not None

    @property
    def is_pending(self) -> bool:
        """Waiting requests need it and nobody computes it."""
        return self.pages is None and self.num_waiting > 0 and not self.num_prefilling


@dataclass(frozen=True, slots=True)
class Insertion:
    """`node` ends the inserted prefix; `declined` are pages whose place was already taken."""

    node: RadixNode
    declined: list[int]


class RadixCache:
    """The tree. With `enabled=False` it stays empty: nothing matches, every insert is declined."""

    def __init__(self, page_size: int, *, enabled: bool = True) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self.root = RadixNode(parent=None, key=None, tokens=[], end=0, pages=[])
        self.evictable_pages = 0
        self.locked_pages = 0
        # Wanted by waiting requests and cached nowhere: `missing_tokens` count for each of them,
        # `pending_tokens` count once, and only those that nobody is computing.
        self.missing_tokens = 0
        self.pending_tokens = 0
        # Parked requests whose wait is over; the waiting queue takes them from here.
        self.unparked: list[Request] = []
        self._uses = 0
        self._heap_entries = 0
        self._eviction_heap: list[tuple[int, int, RadixNode]] = []

    @property
    def cached_pages(self) -> int:
        return self.evictable_pages + self.locked_pages

    # What requests want

    def want(self, tokens: list[int], namespace: str = "") -> RadixNode:
        """Registers a waiting request's path over the whole pages of `tokens`; returns its end."""
        node = self.root
        use = self._next_use()
        while self.enabled and node.end + self.page_size <= len(tokens):
            child = self._step_down(node, tokens, namespace)
            if child is None:
                end = len(tokens) // self.page_size * self.page_size
                child = self._attach(node, tokens[node.end : end], namespace)
            node = child
            node.last_used = use
        self._change_demand(node, waiting=1)
        return node

    def unwant(self, path: RadixNode) -> None:
        """The waiting request of `path` is gone."""
        self._change_demand(path, waiting=-1)

    def claim(self, path: RadixNode) -> None:
        """The waiting request of `path` prefills from now on."""
        self._change_demand(path, waiting=-1, prefilling=1)

    def unclaim(self, path: RadixNode) -> None:
        """The prefilling request of `path` has finished its prompt, or never will."""
        self._change_demand(path, prefilling=-1)

    def match(self, path: RadixNode) -> RadixNode:
        """The last cached node of a path: `.end` tokens of it are cached."""
        node = path
        while not node.is_cached:
            assert node.parent is not None
            node = node.parent
        return node

    def claimed_node(self, path: RadixNode) -> RadixNode | None:
        """The last node of `path` that has no pages yet and that another request prefills."""
        node = path
        while not node.is_cached:
            if node.num_prefilling:
                return node
            assert node.parent is not None
            node = node.parent
        return None

    # What is cached

    def pages_of(self, node: RadixNode) -> list[int]:
        """The pages of the whole prefix that ends with the cached `node`, in token order."""
        runs = []
        while node.parent is not None:
            assert node.pages is not None
            runs.append(node.pages)
            node = node.parent
        return [page for run in reversed(runs) for page in run]

    def accepts(self, below: RadixNode, tokens: list[int], namespace: str = "") -> bool:
        """Whether there is a page of `tokens` after `below`, and `insert` would decline none.

        The first page tells: where it is not cached, nothing behind it is.
        """
        if not self.enabled or len(tokens) < below.end + self.page_size:
            return False
        child = below.children.get(self._child_key(below, tokens, below.end, namespace))
        return child is None or not child.is_cached

    def insert(
        self, below: RadixNode, tokens: list[int], pages: list[int], namespace: str = ""
    ) -> Insertion:
        """Caches `pages`, which hold the KV of `tokens` from position `below.end` on.

        Args:
            below: a cached node that cannot be evicted now: locked, or the root.
            tokens: the whole prefix from position 0, at least to the end of `pages`.
            pages: page ids that the cache owns from now on, but for those it declines.
            namespace: as given to `want`.
        """
        if not self.enabled:
            return Insertion(self.root, pages)
        end = below.end + len(pages) * self.page_size
        tokens = tokens[:end]
        declined: list[int] = []
        use = self._next_use()
        node = below
        while node.end < end:
            child = self._step_down(node, tokens, namespace)
            if child is None:
                child = self._attach(node, tokens[node.end :], namespace)
            start = (node.end - below.end) // self.page_size
            run = pages[start : start + len(child.tokens) // self.page_size]
            child.last_used = use
            if child.is_cached:
                declined += run
            else:
                self._fill(child, run)
            node = child
        return Insertion(node, declined)

    def lock(self, node: RadixNode) -> None:
        """Keeps the prefix that ends with the cached `node` from being evicted."""
        use = self._next_use()
        while node.parent is not None:
            assert node.pages is not None
            if node.lock_count == 0:
                self.evictable_pages -= len(node.pages)
                self.locked_pages += len(node.pages)
            node.lock_count += 1
            node.last_used = use
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        """Takes back one `lock`; the end of a use counts as a use."""
        use = self._next_use()
        while node.parent is not None:
            assert node.pages is not None
            node.lock_count -= 1
            node.last_used = use
            if node.lock_count == 0:
                self.evictable_pages += len(node.pages)
                self.locked_pages -= len(node.pages)
                self._offer_for_eviction(node)
            node = node.parent

    def evict(self, num_pages: int) -> list[int]:
        """Drops up to `num_pages` unlocked pages, least recently used leaf first, from its tail.

        Returns the page ids; fewer than asked only when nothing evictable is left.
        """
        evicted: list[int] = []
        while len(evicted) < num_pages and self._eviction_heap:
            used, _, node = heapq.heappop(self._eviction_heap)
            node.in_eviction_heap = False
            if node.last_used != used:
                self._offer_for_eviction(node)
                continue
            if not self._is_evictable(node):
                continue
            assert node.pages is not None
            kept = len(node.pages) - (num_pages - len(evicted))
            if kept > 0:
                self._split(node, kept * self.page_size)
            evicted += self._drop_pages(node)
        return evicted

    # Shape of the tree

    def _step_down(self, node: RadixNode, tokens: list[int], namespace: str) -> RadixNode | None:
        """The child of `node` along `tokens`, cut to what they share; None where there is none."""
        child = node.children.get(self._child_key(node, tokens, node.end, namespace))
        if child is None:
            return None
        shared = self._shared_tokens(child.tokens, tokens, node.end)
        return child if shared == len(child.tokens) else self._split(child, shared)

    def _child_key(
        self, parent: RadixNode, tokens: list[int], start: int, namespace: str
    ) -> Hashable:
        """The first page's tokens; below the root the namespace keeps the trees apart."""
        page = (
            tokens[start] if self.page_size == 1 else tuple(tokens[start : start + self.page_size])
        )
        return (namespace, page) if parent is self.root else page

    def _shared_tokens(self, run: list[int], tokens: list[int], start: int) -> int:
        """How many tokens `run` and `tokens[start:]` share, in whole pages; at least one page.

        Compares slices, which costs a C loop, and halves the range where they differ.
        """
        size = self.page_size
        same, limit = 1, min(len(run), len(tokens) - start) // size
        if run[: limit * size] == tokens[start : start + limit * size]:
            return limit * size
        while limit - same > 1:
            middle = (same + limit) // 2
            if (
                run[same * size : middle * size]
                == tokens[start + same * size : start + middle * size]
            ):
                same = middle
            else:
                limit = middle
        return same * size

    def _attach(self, parent: RadixNode, tokens: list[int], namespace: str) -> RadixNode:
        key = self._child_key(parent, tokens, 0, namespace)
        node = RadixNode(parent, key, tokens, parent.end + len(tokens))
        parent.children[key] = node
        return node

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Puts a new node over the first `length` tokens of `node`, which keeps the rest.

        The lists move up and only the rest is copied: eviction cuts short tails off long runs.
        """
        parent = node.parent
        assert parent is not None
        upper = RadixNode(
            parent,
            node.key,
            node.tokens,
            parent.end + length,
            pages=node.pages,
            num_cached_children=int(node.is_cached),
            lock_count=node.lock_count,
            last_used=node.last_used,
            num_waiting=node.num_waiting,
            num_prefilling=node.num_prefilling,
        )
        node.tokens = node.tokens[length:]
        del upper.tokens[length:]
        if upper.pages is not None:
            num_pages = length // self.page_size
            node.pages = upper.pages[num_pages:]
            del upper.pages[num_pages:]
        parent.children[node.key] = upper
        node.parent, node.key = upper, self._child_key(upper, node.tokens, 0, "")
        upper.children[node.key] = node
        return upper

    # State of a node

    def _change_demand(self, path: RadixNode, waiting: int = 0, prefilling: int = 0) -> None:
        node = path
        while (parent := node.parent) is not None:
            self._count_demand(node, -1)
            node.num_waiting += waiting
            node.num_prefilling += prefilling
            self._count_demand(node, 1)
            if not node.num_prefilling:
                self._unpark(node)
                if not node.is_cached and not node.num_waiting:
                    del parent.children[node.key]
            node = parent

    def _count_demand(self, node: RadixNode, sign: int) -> None:
        """Adds what `node` contributes to the counts of wanted tokens, or takes it off."""
        if node.pages is None:
            self.missing_tokens += sign * node.num_waiting * len(node.tokens)
            if node.is_pending:
                self.pending_tokens += sign * len(node.tokens)

    def _fill(self, node: RadixNode, pages: list[int]) -> None:
        assert node.parent is not None
        self._count_demand(node, -1)
        node.pages = pages
        node.parent.num_cached_children += 1
        self.evictable_pages += len(pages)
        self._unpark(node)
        self._offer_for_eviction(node)

    def _drop_pages(self, node: RadixNode) -> list[int]:
        pages, parent = node.pages, node.parent
        assert pages is not None and parent is not None
        node.pages = None
        self._count_demand(node, 1)
        self.evictable_pages -= len(pages)
        parent.num_cached_children -= 1
        if not node.num_waiting and not node.num_prefilling:
            del parent.children[node.key]
        self._offer_for_eviction(parent)
        return pages

    def _unpark(self, node: RadixNode) -> None:
        self.unparked += node.parked
        node.parked.clear()

    def _is_evictable(self, node: RadixNode) -> bool:
        return (
            node.is_cached
            and node.parent is not None
            and node.lock_count == 0
            and node.num_cached_children == 0
        )

    def _offer_for_eviction(self, node: RadixNode) -> None:
        """Enters `node` in the heap if it may go. Entries are checked when they come out: each is
        at most as recent as its node, so the first that is current is the least recently used."""
        if self._is_evictable(node) and not node.in_eviction_heap:
            node.in_eviction_heap = True
            self._heap_entries += 1
            heapq.heappush(self._eviction_heap, (node.last_used, self._heap_entries, node))

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses
