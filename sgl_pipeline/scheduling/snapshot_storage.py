"""The cached prefixes of a model with states: pages that end with snapshots of the states.

Keys and values are of use only up to a snapshot, where a request can go on. So no leaf is cached
without one, except while requests use it.
"""

from collections.abc import Container

from sgl_pipeline.scheduling.radix_storage import RadixStorage, is_evictable
from sgl_pipeline.scheduling.radix_tree import RadixNode, RadixTree
from sgl_pipeline.scheduling.snapshot_demand import SnapshotDemand
from sgl_pipeline.scheduling.snapshot_order import SnapshotOrder
from sgl_pipeline.scheduling.state_slots import StateSlots


class SnapshotStorage(RadixStorage):
    """As `RadixStorage`. `snapshots` are the nodes with one, in the order in which they give way.
    Slots of lost ones go back to `slots`, and pages that are of no use without them go with
    them."""

    def __init__(self, tree: RadixTree, demand: SnapshotDemand, slots: StateSlots) -> None:
        super().__init__(tree, demand)
        self._slots = slots
        self._snapshot_demand = demand
        self.snapshots = SnapshotOrder()

    def match(self, path: RadixNode) -> RadixNode:
        """The last node of a path with a snapshot, behind which a request can go on."""
        node = path
        while node.parent is not None and node.state_slot is None:
            node = node.parent
        return node

    def attach(self, node: RadixNode, slot: int) -> None:
        """The cached `node` has the snapshot in `slot`, if it has none; else the slot is free."""
        assert node.is_cached
        if node.state_slot is not None:
            self._slots.put_back(slot)
            return
        self._snapshot_demand.set_snapshot(node, slot)
        self.snapshots.add(node)

    def detach(self, node: RadixNode) -> int:
        """Takes the snapshot of `node`, whose pages stay; returns its slot."""
        slot = node.state_slot
        assert slot is not None
        self.snapshots.remove(node)
        self._snapshot_demand.set_snapshot(node, None)
        return slot

    def drop_useless(self, node: RadixNode) -> list[int]:
        """Drops `node` and the nodes above it while they are leaves without a snapshot that no
        request uses. Returns the page ids."""
        pages: list[int] = []
        while node.state_slot is None and is_evictable(node):
            parent = node.parent
            assert parent is not None
            pages += self._drop_run(node)
            node = parent
        return pages

    def unlock(self, node: RadixNode) -> list[int]:
        super().unlock(node)
        return self.drop_useless(node)

    def drop(self, lost: Container[int]) -> list[int]:
        dropped = super().drop(lost)
        assert not self.cached_pages, "states are lost with all pages"
        return dropped

    def check_snapshots(self) -> None:
        """Asserts that `snapshots` are all, that those that are pinned are there, and that the
        cached leaves which no request uses end with one."""
        self.snapshots.check()
        for node in self.cached_nodes():
            run = node.run
            assert run is not None
            assert (node.state_slot is not None) == (node in self.snapshots)
            is_leaf = not run.num_cached_children and not run.lock_count
            assert node.state_slot is not None or not is_leaf, "a leaf without a snapshot"

    def _evict_tail(self, node: RadixNode, num_pages: int) -> list[int]:
        """Drops the whole leaf, as a part of it would be of no use."""
        pages, parent = self._drop_run(node), node.parent
        assert parent is not None
        return pages + self.drop_useless(parent)

    def _drop_run(self, node: RadixNode) -> list[int]:
        if node.state_slot is not None:
            self._slots.put_back(self.detach(node))
        return super()._drop_run(node)
