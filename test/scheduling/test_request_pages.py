"""Whose prefill others wait for, by what each running request has claimed."""

from support.pipelines import make_request

from sgl_pipeline.scheduling.page_pool import PagePool
from sgl_pipeline.scheduling.radix_tree import RadixTree
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.snapshot_demand import SnapshotDemand
from sgl_pipeline.scheduling.snapshot_slots import SnapshotSlots
from sgl_pipeline.scheduling.snapshot_storage import SnapshotStorage
from sgl_pipeline.scheduling.state_slots import StateSlots
from sgl_pipeline.scheduling.state_snapshots import StateSnapshots


def test_a_request_that_has_passed_a_node_does_not_prefill_it_any_more() -> None:
    """It found no slot for a snapshot there, so that the next one has claimed the node as well."""
    tree, pool, slots = RadixTree(4), PagePool(8), StateSlots(2)
    demand = SnapshotDemand(tree)
    storage = SnapshotStorage(tree, demand, slots)
    giving = SnapshotSlots(slots, storage, pool.free)
    snapshots = StateSnapshots(slots, giving, storage, demand, 0)
    pages = RequestPages(pool, storage, demand, slots, snapshots)
    first, second = (make_request(name, range(9)) for name in "ab")
    for request in (first, second):
        path = demand.want(request.prompt_ids)
        assert pages.try_open(request, path, 0)
    assert pages.prefilling(path) is first
    assert pages.states_of_chunk(first, 0, 8) == (None, ())
    first.num_computed = 8
    pages.commit(first)
    assert pages.prefilling(path) is second
    pages.end_prefill(second)
    assert pages.prefilling(path) is None


def test_a_request_that_may_begin_below_waits_for_no_prefill_above() -> None:
    """Another one with its prefix has ended meanwhile, and has left a snapshot."""
    tree, slots = RadixTree(1), StateSlots(2)
    demand = SnapshotDemand(tree)
    storage = SnapshotStorage(tree, demand, slots)
    waiting, path = make_request("a", [1, 2, 3, 4, 5]), demand.want([1, 2, 3, 4])
    claimed = demand.want([1, 2])
    demand.claim(claimed)
    assert demand.claimed_node(path) is claimed
    demand.park(waiting, claimed)
    node = storage.insert(tree.root, [1, 2, 3], [0, 1, 2]).node
    assert demand.take_unparked() == []
    slot = slots.take_free()
    assert slot is not None
    storage.attach(node, slot)
    assert demand.take_unparked() == [waiting] and demand.claimed_node(path) is None
