"""Which snapshot gives its slot up first."""

from sgl_pipeline.scheduling.radix_tree import RadixNode, RadixTree
from sgl_pipeline.scheduling.snapshot_demand import SnapshotDemand
from sgl_pipeline.scheduling.snapshot_storage import SnapshotStorage
from sgl_pipeline.scheduling.state_slots import StateSlots
from sgl_pipeline.scheduling.state_snapshots import StateSnapshots


class _Cache:
    """Cached prefixes, each with a snapshot, and pages that are lost with them."""

    def __init__(self, num_slots: int) -> None:
        tree = RadixTree(page_size=1)
        self.demand = SnapshotDemand(tree)
        self.slots = StateSlots(num_slots)
        self.storage = SnapshotStorage(tree, self.demand, self.slots)
        self.freed: list[int] = []
        self.snapshots = StateSnapshots(self.slots, self.storage, self.demand, self.freed.extend)
        self._root = tree.root

    def put(self, tokens: list[int]) -> RadixNode:
        """Caches `tokens`, whose ids are its pages too."""
        node = self.storage.insert(self._root, tokens, tokens).node
        slot = self.slots.take_free()
        assert slot is not None
        self.storage.attach(node, slot)
        return node


def test_the_least_recently_used_goes_first_with_its_pages() -> None:
    cache = _Cache(2)
    older, newer = cache.put([1, 2]), cache.put([5, 6, 7])
    cache.snapshots.evict()
    assert older.state_slot is None and newer.state_slot is not None
    assert cache.freed == [1, 2]
    assert cache.slots.num_free == 1 == cache.slots.num_evictable


def test_one_that_a_waiting_request_wants_goes_last() -> None:
    cache = _Cache(2)
    wanted = cache.put([1, 2])
    path = cache.demand.want([1, 2, 3])
    other = cache.put([5, 6, 7])
    assert other.last_used > wanted.last_used
    cache.snapshots.evict()
    assert other.state_slot is None and cache.storage.match(path) is wanted
    cache.snapshots.evict()
    assert wanted.state_slot is None and cache.slots.num_free == 2
    assert cache.demand.missing_tokens == 3


def test_the_end_goes_before_what_others_may_share_of_it() -> None:
    cache = _Cache(2)
    whole, head = cache.put([1, 2, 3]), cache.demand.want([1, 2])
    slot = cache.slots.take_free()
    assert slot is not None
    cache.storage.attach(head, slot)
    cache.demand.unwant(head)
    head.last_used = whole.last_used
    cache.snapshots.evict()
    assert head.state_slot is not None and cache.freed == [3]
