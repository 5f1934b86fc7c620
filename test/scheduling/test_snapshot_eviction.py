"""Which snapshot gives its slot up first."""

import pytest
from support.pipelines import make_request

from sgl_pipeline.scheduling.radix_tree import RadixNode, RadixTree
from sgl_pipeline.scheduling.snapshot_demand import SnapshotDemand
from sgl_pipeline.scheduling.snapshot_order import MAX_PASSED
from sgl_pipeline.scheduling.snapshot_slots import SnapshotSlots
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
        self.giving = SnapshotSlots(self.slots, self.storage, self.freed.extend)
        parts = self.slots, self.giving, self.storage, self.demand
        self.snapshots = StateSnapshots(*parts, interval=0)
        self._root = tree.root

    def put(self, tokens: list[int]) -> RadixNode:
        """Caches `tokens`, whose ids are its pages too."""
        node = self.storage.insert(self._root, tokens, tokens).node
        slot = self.slots.take_free()
        assert slot is not None
        self.storage.attach(node, slot)
        return node


def test_the_least_recently_used_goes_first_with_its_pages() -> None:
    cache = _Cache(3)
    used, older, newer = cache.put([9]), cache.put([1, 2]), cache.put([5, 6, 7])
    cache.storage.snapshots.use(used)
    cache.giving.evict()
    assert older.state_slot is None and newer.state_slot is not None
    assert cache.freed == [1, 2]
    cache.giving.evict()
    assert newer.state_slot is None and used.state_slot is not None
    assert cache.slots.num_free == 2 and cache.slots.num_evictable == 1


def test_one_that_a_waiting_request_wants_goes_last() -> None:
    cache = _Cache(2)
    wanted = cache.put([1, 2])
    path = cache.demand.want([1, 2, 3])
    other = cache.put([5, 6, 7])
    assert other.last_used > wanted.last_used
    cache.giving.evict()
    assert other.state_slot is None and cache.storage.match(path) is wanted
    cache.giving.evict()
    assert wanted.state_slot is None and cache.slots.num_free == 2
    assert cache.demand.missing_tokens == 3


def test_only_the_snapshot_that_a_request_begins_with_is_used() -> None:
    cache = _Cache(2)
    head = cache.put([1, 2])
    whole = cache.storage.insert(head, [1, 2, 3], [3]).node
    slot = cache.slots.take_free()
    assert slot is not None
    cache.storage.attach(whole, slot)
    cache.demand.want([1, 2, 3, 4])
    # It passes the first one and begins behind the second.
    cache.giving.evict()
    assert head.state_slot is None and whole.state_slot is not None and not cache.freed


def test_an_older_one_of_the_same_chat_goes_before_other_chats() -> None:
    cache = _Cache(4)
    other, shared, older = cache.put([9]), cache.put([5]), cache.put([1, 2])
    newest = cache.put([1, 2, 3])
    assert [*cache.storage.snapshots] == [older, other, shared, newest]
    # With two ways on, it is of use for more than the newest one.
    cache.storage.insert(shared, [5, 6], [6])
    cache.giving.evict()
    cache.put([5, 7])
    assert [*cache.storage.snapshots][:2] == [other, shared]


def test_those_that_are_wanted_are_not_looked_at_again() -> None:
    cache = _Cache(4)
    wanted = [cache.put([number]) for number in range(2)]
    for number in range(2):
        cache.demand.want([number, 9])
    for number in (5, 6):
        cache.put([number])
    cache.giving.evict()
    assert [*cache.storage.snapshots][1:] == wanted


def test_one_search_passes_over_so_many_and_the_next_one_goes_on_behind_them() -> None:
    cache = _Cache(2 * MAX_PASSED + 2)
    for number in range(2 * MAX_PASSED + 1):
        cache.put([number])
        cache.demand.want([number, -1])
    unwanted = cache.put([-2])
    order = cache.storage.snapshots
    assert [order.first_unwanted() for _ in range(4)] == [None, None, unwanted, unwanted]


@pytest.mark.parametrize(("num_slots", "left"), [(4, [9, 2]), (3, [9])])
def test_a_prompts_snapshot_goes_first_only_where_its_slot_is_needed(
    num_slots: int, left: list[int]
) -> None:
    """The newest of the two is the prompt's; nodes by their last tokens."""
    cache = _Cache(num_slots)
    cache.put([9])
    prompt = cache.put([1, 2])
    request = make_request("a", [1, 2, 3])
    cache.storage.lock(prompt)
    cache.snapshots.open(request, prompt, prompt)
    cache.snapshots.of_chunk(request, prompt, prompt, 2, 3)
    cache.snapshots.end_step()
    request.num_computed = 3
    assert cache.snapshots.leave_behind(request, prompt) is not None
    assert [node.tokens[-1] for node in cache.storage.snapshots] == left
