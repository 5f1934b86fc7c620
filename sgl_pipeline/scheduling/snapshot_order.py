"""The order in which cached snapshots of states give way."""

from collections import OrderedDict
from collections.abc import Iterator

from sgl_pipeline.scheduling.radix_tree import RadixNode

# Snapshots that one search passes over because waiting requests want them, or readers begin there.
MAX_PASSED = 64


class SnapshotOrder:
    """The nodes with a snapshot: those that one longer prefix alone continues, then the least
    recently used. One that is pinned does not give way: its readers have not begun, or their step
    is being put together."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[RadixNode, None] = OrderedDict()
        self._num_readers: dict[RadixNode, int] = {}

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._nodes)

    def __contains__(self, node: RadixNode) -> bool:
        return node in self._nodes

    @property
    def num_evictable(self) -> int:
        return len(self._nodes) - len(self._num_readers)

    def add(self, node: RadixNode) -> None:
        """`node` has a snapshot now, to which its parent leads."""
        self._nodes[node] = None
        assert node.parent is not None
        self.give_up_first(node.parent, 1)

    def remove(self, node: RadixNode) -> None:
        del self._nodes[node]

    def use(self, node: RadixNode) -> None:
        """The snapshot of `node` is the most recently used one now."""
        self._nodes.move_to_end(node)

    def pin(self, node: RadixNode) -> None:
        """A further reader begins with the snapshot of `node`, which counts as a use."""
        self.use(node)
        self._num_readers[node] = self._num_readers.get(node, 0) + 1

    def unpin(self, node: RadixNode) -> None:
        """One reader of `node` less."""
        self._num_readers[node] -= 1
        if not self._num_readers[node]:
            del self._num_readers[node]

    def is_pinned(self, node: RadixNode) -> bool:
        return node in self._num_readers

    def give_up_first(self, node: RadixNode, num_children: int) -> None:
        """There is a snapshot behind `node` now: the last one up to `node` gives way first, if
        nothing else is cached behind it. `num_children` of the cached children of `node` lead
        there."""
        while node.parent is not None and node.run is not None:
            if node.run.num_cached_children > num_children:
                return
            if node in self._nodes:
                self._nodes.move_to_end(node, last=False)
                return
            node, num_children = node.parent, 1

    def first(self) -> RadixNode:
        """The first that gives way to a request; there is one."""
        return next(node for node in self._nodes if node not in self._num_readers)

    def first_unwanted(self) -> RadixNode | None:
        """The first that no waiting request would begin with; None if it would be passed over as
        the first `MAX_PASSED` are. That counts as a use, so that it does not happen again at once.
        """
        for _ in range(min(MAX_PASSED, len(self._nodes))):
            node = next(iter(self._nodes))
            if node not in self._num_readers and not node.num_missing:
                return node
            self.use(node)
        return None

    def check(self) -> None:
        """Asserts that pinned snapshots are there."""
        assert all(node in self._nodes for node in self._num_readers)
