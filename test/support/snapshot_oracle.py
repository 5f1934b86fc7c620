"""What must hold of snapshots, counted anew from all requests and steps."""

from collections import Counter

from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.snapshot_demand import SnapshotDemand
from sgl_pipeline.scheduling.step_scheduler import StepScheduler


def check_snapshot_demand(scheduler: StepScheduler) -> None:
    """Asserts that counts of nodes, sums over the tree, hits and parked requests are those that the
    waiting and the prefilling requests ask for, one by one."""
    pages, queue = scheduler._pages, scheduler._waiting
    demand = pages._demand
    assert isinstance(demand, SnapshotDemand)
    claimed = _claimed(scheduler)
    waiting, missing, pending = Counter[RadixNode](), Counter[RadixNode](), Counter[RadixNode]()
    wanted = Counter[RadixNode]()
    parked = {
        one: node
        for node in _nodes(demand._tree.root)
        for one in node.parked
        if one in queue._parked  # else it was aborted
    }
    assert queue._parked <= {*parked, *demand._unparked}
    for request, path in queue._paths.items():
        nodes = _from_root(path)
        with_snapshot = [node for node in nodes if node.state_slot is not None]
        hit = with_snapshot[-1] if with_snapshot else demand._tree.root
        assert pages.storage.match(path) is hit
        lacking = [node for node in nodes if node.end > hit.end]
        awaited = [node for node in lacking if claimed[node]]
        assert demand.claimed_node(path) is (awaited[-1] if awaited else None)
        waiting.update(nodes)
        wanted[hit] += 1
        missing.update(lacking)
        pending.update(node for node in lacking if not awaited or node.end > awaited[-1].end)
        assert request not in parked or parked[request] in awaited
    for node in _nodes(demand._tree.root):
        counts = node.num_waiting, node.num_prefilling
        assert counts == (waiting[node], claimed[node]), "what requests want and bring"
        lacking_it = missing if node.state_slot is None else wanted
        assert node.num_missing == lacking_it[node], "requests that lack it, or begin with it"
        if node.state_slot is None and not claimed[node]:
            assert node.num_pending == pending[node], "requests that nobody brings it to"
    assert demand.missing_tokens == sum(len(one.tokens) * n for one, n in missing.items())
    assert demand.missing_attended == sum(_attended(one) * n for one, n in missing.items())
    assert demand.pending_tokens == sum(len(one.tokens) for one in pending)
    assert demand.pending_attended == sum(_attended(one) for one in pending)


def check_slots_in_flight(scheduler: StepScheduler) -> None:
    """Asserts that the chunks of a step may be computed in any order, and that nothing is matchable
    that a step in flight writes."""
    cached = {node.state_slot for node in _nodes(scheduler._pages._demand._tree.root)} - {None}
    for step in scheduler._in_flight:
        written = [one.slot for chunk in step.chunks for one in chunk.snapshots]
        assert cached.isdisjoint(written), "matchable before its step has come back"
        written += [slot for one in step.chunks if (slot := one.request.state_slot) is not None]
        assert len(written) == len({*written}), "two chunks of a step write one slot"
        read = {chunk.state_source for chunk in step.chunks}
        assert read.isdisjoint(written), "a chunk of a step writes what another one reads"


def _claimed(scheduler: StepScheduler) -> Counter[RadixNode]:
    """The number of running requests that will still bring a node."""
    claimed = Counter[RadixNode]()
    for request, holding in scheduler._pages._holdings.items():
        if holding.claimed_path is None:
            continue
        assert holding.claimed_below.end <= request.num_computed
        nodes = _from_root(holding.claimed_path)
        claimed.update(node for node in nodes if node.end > holding.claimed_below.end)
    return claimed


def _nodes(root: RadixNode) -> list[RadixNode]:
    nodes = [*root.children.values()]
    for node in nodes:
        nodes += node.children.values()
    return nodes


def _from_root(path: RadixNode) -> list[RadixNode]:
    """The nodes of a path without the root, parents first."""
    nodes = []
    while path.parent is not None:
        nodes.append(path)
        path = path.parent
    return nodes[::-1]


def _attended(node: RadixNode) -> int:
    return sum(range(node.end - len(node.tokens) + 1, node.end + 1))
