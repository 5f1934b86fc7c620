"""The prefixes that waiting and prefilling requests want, and the tokens that are left to compute.

`WaitingQueue` registers what its requests want, so that one walk at arrival replaces matching the
queue again and again: a request's hit is the cached part of its path, current at any time.
`RequestPages` reports which requests prefill, `RadixStorage` which nodes are cached. It never
touches a page.
"""

from collections.abc import Callable

from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.radix_tree import RadixNode, RadixTree
from sgl_pipeline.step_work import attended_tokens


class RadixDemand:
    """Counts what requests want of the nodes of `tree`, as requests and pages come and go.

    `missing_tokens` are the tokens of nodes that waiting requests want and that are not cached,
    once for each request. `pending_tokens` counts each of these nodes once, and only those that no
    request prefills. `missing_attended` and `pending_attended` are what the same tokens attend to.
    A request is parked only at a node that is not cached and that another request prefills. `paths`
    are the ends of what waiting requests want, written by `WaitingQueue`. `on_changed` hears of
    each node that was cached or evicted.
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self.missing_tokens = 0
        self.pending_tokens = 0
        self.missing_attended = 0
        self.pending_attended = 0
        self._unparked: list[Request] = []
        self.paths: dict[Request, RadixNode] = {}
        self.on_changed: Callable[[RadixNode], None] | None = None

    def want(self, tokens: list[int], namespace: str = "") -> RadixNode:
        """Registers a waiting request's path over the whole pages of `tokens`; returns its end."""
        nodes = self._tree.walk(self._tree.root, tokens, namespace)
        path = nodes[-1] if nodes else self._tree.root
        self._change(path, waiting=1)
        return path

    def unwant(self, path: RadixNode) -> None:
        """The waiting request of `path` is gone."""
        self._change(path, waiting=-1)

    def claim(self, path: RadixNode, hit: RadixNode | None = None) -> None:
        """The waiting request of `path` prefills what follows `hit` (None: the root) from now
        on."""
        self._change(path, waiting=-1, prefilling=1, above=hit)

    def claim_for_load(self, path: RadixNode) -> None:
        """A load brings the pages of `path`, which its caller has just walked."""
        self._change(path, prefilling=1)

    def unclaim(self, path: RadixNode, hit: RadixNode | None = None) -> None:
        """The prefilling request of `path` below `hit`, as it was claimed, has finished its prompt,
        or never will; or its load has ended."""
        self._change(path, prefilling=-1, above=hit)

    def claimed_node(self, path: RadixNode) -> RadixNode | None:
        """The last node of `path` that is not cached yet and that another request prefills, or a
        load brings."""
        node = path
        while not node.is_cached:
            if node.num_prefilling:
                return node
            assert node.parent is not None
            node = node.parent
        return None

    def park(self, request: Request, claimed: RadixNode) -> None:
        """Notes a request that waits until `claimed`, its `claimed_node`, is cached or given up."""
        claimed.parked.append(request)

    def take_unparked(self) -> list[Request]:
        """The parked requests whose wait has ended since the last call."""
        unparked, self._unparked = self._unparked, []
        return unparked

    # Reports of the storage

    def on_cached(self, node: RadixNode) -> None:
        """`node` has just been cached."""
        self._count(node, -1)
        self._unpark(node)
        if self.on_changed is not None:
            self.on_changed(node)

    def on_evicted(self, node: RadixNode) -> None:
        """`node` has just lost its pages."""
        self._count(node, 1)
        if self.on_changed is not None:
            self.on_changed(node)

    def _change(
        self,
        path: RadixNode,
        waiting: int = 0,
        prefilling: int = 0,
        above: RadixNode | None = None,
    ) -> None:
        """Changes the number of requests that want `path`, and with it every node above; of those
        that prefill, up to the node `above` it, which is not changed (None: the root)."""
        node = path
        while (parent := node.parent) is not None:
            if node is above:
                prefilling = 0
            is_missing = not node.is_cached
            if is_missing:
                self._count(node, -1)
            node.num_waiting += waiting
            node.num_prefilling += prefilling
            if is_missing:
                self._count(node, 1)
                if not node.num_prefilling:
                    self._unpark(node)
                self._tree.prune(node)
            node = parent

    def _count(self, node: RadixNode, sign: int) -> None:
        """Adds (`sign` 1) or subtracts (-1) the counts of `node` while it is not cached."""
        if not node.num_waiting:
            return
        tokens = sign * len(node.tokens)
        attended = sign * attended_tokens(node.end - len(node.tokens), node.end)
        self.missing_tokens += node.num_waiting * tokens
        self.missing_attended += node.num_waiting * attended
        if not node.num_prefilling:
            self.pending_tokens += tokens
            self.pending_attended += attended

    def _unpark(self, node: RadixNode) -> None:
        self._unparked += node.parked
        node.parked.clear()
