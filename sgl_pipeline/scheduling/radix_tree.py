"""The shape of the radix tree over token prefixes: the prefixes, and where they part.

`RadixDemand` and `RadixStorage` share one tree: one notes on its nodes which prefixes requests
want, the other which have KV pages. It never counts tokens and never takes or returns a page.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.page_run import PageRun


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of tokens, a whole number of pages long, that continues its parent's prefix.

    All three parts read a node, but each field has one writer. Always true:

    - The parent of a cached node is cached. A request that wants a node wants its parent.
    - Every node except the root has a run, is wanted, or leads to such a node; `RadixTree.prune`
      drops it otherwise.
    - A node that ends a path or a match keeps doing so: a split keeps the object for the lower
      half.
    """

    # Shape: written by `RadixTree`.
    parent: "RadixNode | None"
    key: Hashable  # its place in `parent.children`
    tokens: list[int]
    end: int  # tokens from the root to this node's end
    children: dict[Hashable, "RadixNode"] = field(default_factory=dict)
    # The last walk or end of a lock through this node, by `RadixTree.next_use`.
    last_used: int = 0
    # Written by `RadixStorage`.
    run: PageRun | None = None
    # Demand: written by `RadixDemand`. Number of requests that have a path through this node.
    num_waiting: int = 0
    num_prefilling: int = 0  # and loads
    # In models with states, written by `SnapshotDemand`: where its snapshot of the states is, and
    # what its waiting requests lack (see there).
    state_slot: int | None = None
    num_missing: int = 0
    num_pending: int = 0
    # Waiting requests that are parked until this node's pages are committed, by the request that
    # prefills them or the load that brings them.
    parked: list[Request] = field(default_factory=list)
    # The hash of each of its pages, once they are known: written by `page_hashing.py`.
    page_hashes: Sequence[bytes] = ()

    @property
    def is_cached(self) -> bool:
        """True if a request can use the KV of these tokens where it lies."""
        return self.run is not None

    @property
    def is_needed(self) -> bool:
        """True if it has a run, or is wanted, or leads to a node of which that is true."""
        return (
            self.run is not None
            or self.num_waiting > 0
            or self.num_prefilling > 0
            or bool(self.children)
        )

    @property
    def last_cached(self) -> "RadixNode":
        """The last cached node of the path that ends here; the root is always cached."""
        node = self
        while not node.is_cached:
            assert node.parent is not None
            node = node.parent
        return node


class RadixTree:
    """All nodes, from a root without tokens. With `enabled=False` it stays the only one.

    `on_split` hears of the new upper and the lower half of each node that is split.
    """

    def __init__(self, page_size: int, *, enabled: bool = True) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self.root = RadixNode(parent=None, key=None, tokens=[], end=0, run=PageRun([]))
        self.on_split: Callable[[RadixNode, RadixNode], None] | None = None
        self._uses = 0

    def next_use(self) -> int:
        """A number larger than all before. LRU order comes from this counter, not from a clock."""
        self._uses += 1
        return self._uses

    def walk(self, below: RadixNode, tokens: list[int], namespace: str = "") -> list[RadixNode]:
        """Returns the nodes over the whole pages of `tokens` below `below`; makes the missing ones.

        It counts as a use of each of them. The last one ends with the last whole page: a node that
        shares only part of its tokens is split.

        Args:
            below: a node whose prefix begins `tokens`.
            tokens: the whole prefix from position 0.
            namespace: prefixes of different namespaces share nothing.
        """
        if not self.enabled:
            return []
        end = len(tokens) // self.page_size * self.page_size
        use = self.next_use()
        path: list[RadixNode] = []
        node = below
        while node.end < end:
            child = self._step_down(node, tokens, namespace)
            if child is None:
                child = self._attach(node, tokens[node.end : end], namespace)
            child.last_used = use
            path.append(child)
            node = child
        return path

    def child_along(
        self, node: RadixNode, tokens: list[int], namespace: str = ""
    ) -> RadixNode | None:
        """The child of `node` that shares the next page of `tokens`, which must have one."""
        return node.children.get(self._child_key(node, tokens, node.end, namespace))

    def split(self, node: RadixNode, length: int) -> RadixNode:
        """Puts a new node over the first `length` tokens of `node`, which keeps the rest.

        The new node was used and is wanted and locked as `node` is; requests parked at `node` stay
        there. The list moves up and only the rest is copied: eviction cuts short tails off long
        runs.
        """
        parent = node.parent
        assert parent is not None
        upper = RadixNode(
            parent,
            node.key,
            node.tokens,
            parent.end + length,
            last_used=node.last_used,
            run=None if node.run is None else node.run.cut_front(length // self.page_size),
            num_waiting=node.num_waiting,
            num_prefilling=node.num_prefilling,
        )
        node.tokens = node.tokens[length:]
        del upper.tokens[length:]
        num_pages = length // self.page_size
        upper.page_hashes = node.page_hashes[:num_pages]
        node.page_hashes = node.page_hashes[num_pages:]
        parent.children[node.key] = upper
        node.parent, node.key = upper, self._child_key(upper, node.tokens, 0, "")
        upper.children[node.key] = node
        if self.on_split is not None:
            self.on_split(upper, node)
        return upper

    def prune(self, node: RadixNode) -> None:
        """Drops `node` if nothing needs it."""
        if not node.is_needed:
            assert node.parent is not None
            del node.parent.children[node.key]

    def _step_down(self, node: RadixNode, tokens: list[int], namespace: str) -> RadixNode | None:
        """The child of `node` along `tokens`, cut to their common prefix; None if there is no such
        child."""
        child = self.child_along(node, tokens, namespace)
        if child is None:
            return None
        shared = self._shared_tokens(child.tokens, tokens, node.end)
        return child if shared == len(child.tokens) else self.split(child, shared)

    def _child_key(
        self, parent: RadixNode, tokens: list[int], start: int, namespace: str
    ) -> Hashable:
        """The first page's tokens; below the root the namespace keeps the trees apart."""
        page = (
            tokens[start] if self.page_size == 1 else tuple(tokens[start : start + self.page_size])
        )
        return (namespace, page) if parent is self.root else page

    def _shared_tokens(self, run: list[int], tokens: list[int], start: int) -> int:
        """Number of tokens that `run` and `tokens[start:]` share, in whole pages; at least one
        page.

        Compares slices in a C loop, and halves the range in which they differ.
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
