"""The prefixes that requests want, and the tokens left to compute, in models with states.

There a request can begin only behind a node with a snapshot of the states, whatever pages are
cached, so a node without one may be above a node with one. A claim goes from the end of a path up
to the node that its request has computed: what lies above will get no snapshot from it any more.
"""

from sgl_pipeline.scheduling.radix_demand import RadixDemand
from sgl_pipeline.scheduling.radix_tree import RadixNode, RadixTree
from sgl_pipeline.step_work import attended_tokens


class SnapshotDemand(RadixDemand):
    """As `RadixDemand`, where "has a snapshot" takes the place of "is cached".

    `RadixNode.num_missing` counts the waiting requests through a node that pass no snapshot below
    it, `num_pending` those that pass no claimed node below it either. A node adds to the sums, and
    its parent's counts, what is neither held by its own snapshot nor, of the second, by a claim.
    """

    def __init__(self, tree: RadixTree) -> None:
        super().__init__(tree)
        tree.on_split = self._on_split

    def set_snapshot(self, node: RadixNode, slot: int | None) -> None:
        """`node` has its snapshot in `slot` from now on; None: it has lost it."""
        assert node.parent is not None and (node.state_slot is None) != (slot is None)
        before = self._leave_sums(node)
        node.state_slot = slot
        after = self._enter_sums(node)
        if slot is not None:
            self._unpark(node)
        self._walk_up(node.parent, after[0] - before[0], after[1] - before[1])

    def advance(self, path: RadixNode, above: RadixNode, num_tokens: int) -> RadixNode:
        """Takes back the part of the claim on `path`, which goes up to `above`, that lies within
        the first `num_tokens` tokens. Returns the node to which the claim goes up now."""
        node = path
        while node is not above and node.end > num_tokens:
            assert node.parent is not None
            node = node.parent
        if node is not above:
            self._change(node, prefilling=-1, above=above)
        return node

    def unclaim(self, path: RadixNode, hit: RadixNode | None = None) -> None:
        if path is not hit:  # else all of it was taken back, and the node may be gone
            super().unclaim(path, hit)

    def claimed_node(self, path: RadixNode) -> RadixNode | None:
        node = path
        while node.parent is not None and node.state_slot is None:
            if node.num_prefilling:
                return node
            node = node.parent
        return None

    def on_cached(self, node: RadixNode) -> None:
        """Pages alone are of no use."""

    def on_evicted(self, node: RadixNode) -> None:
        """Its snapshot has gone before."""
        assert node.state_slot is None

    def _change(
        self,
        path: RadixNode,
        waiting: int = 0,
        prefilling: int = 0,
        above: RadixNode | None = None,
    ) -> None:
        missing = pending = waiting
        node = path
        while (parent := node.parent) is not None:
            if node is above:
                prefilling = 0
            before = self._leave_sums(node)
            node.num_waiting += waiting
            node.num_prefilling += prefilling
            node.num_missing += missing
            node.num_pending += pending
            after = self._enter_sums(node)
            missing, pending = after[0] - before[0], after[1] - before[1]
            if not node.num_prefilling:
                self._unpark(node)
            self._tree.prune(node)
            if parent.is_needed and not (waiting or prefilling or missing or pending):
                return
            node = parent

    def _walk_up(self, node: RadixNode, missing: int, pending: int) -> None:
        """Adds to the counts of `node` and the nodes above, as far as these pass on. Requests that
        are parked there may begin below, where fewer lack a snapshot than before."""
        while node.parent is not None and (missing or pending):
            if missing < 0:
                self._unpark(node)
            before = self._leave_sums(node)
            node.num_missing += missing
            node.num_pending += pending
            after = self._enter_sums(node)
            missing, pending = after[0] - before[0], after[1] - before[1]
            node = node.parent

    def _leave_sums(self, node: RadixNode) -> tuple[int, int]:
        return self._add_to_sums(node, -1)

    def _enter_sums(self, node: RadixNode) -> tuple[int, int]:
        return self._add_to_sums(node, 1)

    def _add_to_sums(self, node: RadixNode, sign: int) -> tuple[int, int]:
        """Adds `node` to the sums (`sign` 1), or takes it out (-1). Returns what it passes on to
        the counts of its parent: missing, pending."""
        missing, pending = _passed_on(node)
        if missing:
            tokens = sign * len(node.tokens)
            attended = sign * attended_tokens(node.end - len(node.tokens), node.end)
            self.missing_tokens += missing * tokens
            self.missing_attended += missing * attended
            if pending:
                self.pending_tokens += tokens
                self.pending_attended += attended
        return missing, pending

    @staticmethod
    def _on_split(upper: RadixNode, lower: RadixNode) -> None:
        """All requests of `upper` go on through `lower`, which keeps the snapshot."""
        upper.num_missing, upper.num_pending = _passed_on(lower)


def _passed_on(node: RadixNode) -> tuple[int, int]:
    """The waiting requests through `node` that pass no snapshot at or below it, and of these those
    that pass no claimed node either."""
    if node.state_slot is not None:
        return 0, 0
    return node.num_missing, 0 if node.num_prefilling else node.num_pending
