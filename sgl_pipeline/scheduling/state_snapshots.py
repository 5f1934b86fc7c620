"""Snapshots of the states of running requests: where they are taken, and who owns their slots.

A chunk that passes a place leaves the state there in a slot of its own as well. When its step has
come back, the snapshot goes to the radix tree with the pages before it, where others begin with it.
Without a slot there is no snapshot, and no request waits for one. Places, all of them ends of nodes
of the request's path:

- the end of the path;
- where waiting requests leave it that find nothing deeper;
- the end of what was cached of it without a snapshot when the request was admitted.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from sgl_pipeline.microbatch import StateSnapshot
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.snapshot_demand import SnapshotDemand
from sgl_pipeline.scheduling.snapshot_storage import SnapshotStorage
from sgl_pipeline.scheduling.state_slots import StateSlots


@dataclass(slots=True)
class _Progress:
    """A running request. Until its first chunk is scheduled it keeps `source`, the node with the
    snapshot that it begins with. `wanted` was cached without one. The steps of snapshots
    `in_flight` have not come back; those `held` wait for their pages to be cached."""

    source: RadixNode | None
    wanted: RadixNode | None
    in_flight: list[StateSnapshot] = field(default_factory=list)
    held: list[StateSnapshot] = field(default_factory=list)


class StateSnapshots:
    """The snapshots of running requests in `slots`, and the nodes of `storage` that keep theirs;
    `free_pages` takes pages back that are lost with a snapshot."""

    def __init__(
        self,
        slots: StateSlots,
        storage: SnapshotStorage,
        demand: SnapshotDemand,
        free_pages: Callable[[list[int]], None],
    ) -> None:
        self._slots = slots
        self._demand = demand
        self._storage = storage
        self._free_pages = free_pages
        self._running: dict[Request, _Progress] = {}
        # With readers that have not begun, or whose step is being put together: the slots are not
        # to be written in that step.
        self._pinned: dict[RadixNode, int] = {}
        self._read: list[RadixNode] = []
        self._num_held = 0
        slots.source = self

    @property
    def num_evictable(self) -> int:
        return len(self._storage.snapshots) - len(self._pinned) + self._num_held

    def evict(self) -> None:
        """Frees the slot of the least recently used snapshot that no waiting request wants, else of
        one that is wanted, or held."""
        idle = (node for node in self._storage.snapshots if node not in self._pinned)
        # Whatever can use a node can use those above it: of equally recent ones the last goes.
        node = min(
            idle, key=lambda one: (one.num_waiting > 0, one.last_used, -one.end), default=None
        )
        if node is not None:
            self._slots.put_back(self._storage.detach(node))
            self._free_pages(self._storage.drop_useless(node))
            return
        holder = next(one for one in self._running.values() if one.held)
        self._slots.put_back(holder.held.pop(0).slot)
        self._num_held -= 1

    def end_step(self) -> None:
        """A step has its chunks: the next one may write to the slots that they read."""
        for node in self._read:
            self._unpin(node)
        self._read.clear()

    def open(self, request: Request, path: RadixNode, hit: RadixNode) -> None:
        """Gives an admitted request its slot. It goes on behind `hit`, which is locked."""
        cached = path.last_cached
        progress = _Progress(None, None if cached is hit else cached)
        self._running[request] = progress
        if hit.parent is None:
            self._slots.give(request)
            return
        is_last = not self._slots.num_free and self.num_evictable == 1
        if is_last and hit not in self._pinned:
            # No other slot is available: the snapshot becomes the request's own state.
            request.state_slot = self._storage.detach(hit)
            return
        self._pinned[hit] = self._pinned.get(hit, 0) + 1
        progress.source = hit
        self._slots.give(request)

    def of_chunk(
        self,
        request: Request,
        path: RadixNode | None,
        above: RadixNode | None,
        start: int,
        end: int,
    ) -> tuple[int | None, tuple[StateSnapshot, ...]]:
        """The slot of the snapshot that the chunk of `request` from `start` to `end` begins with,
        if it does, and the snapshots that it takes; `path` up to `above` is claimed."""
        progress, source = self._running[request], None
        if progress.source is not None:
            source = progress.source.state_slot
            assert source is not None
            self._read.append(progress.source)
            progress.source = None
        snapshots = []
        for node in self._places(progress, path, above, start, end):
            if (slot := self._take()) is None:
                break
            snapshots.append(StateSnapshot(node.end, slot))
        snapshots.sort(key=lambda one: one.num_tokens)
        progress.in_flight += snapshots
        return source, tuple(snapshots)

    def _places(
        self,
        progress: _Progress,
        path: RadixNode | None,
        above: RadixNode | None,
        start: int,
        end: int,
    ) -> Iterator[RadixNode]:
        """The ends of nodes of the claimed `path` after `start` and up to `end` where a snapshot is
        of use, the last first."""
        node = path
        while node is not None and node is not above and node.end > start:
            is_useful = node is path or node.num_pending > 0 or node is progress.wanted
            if node.end <= end and node.state_slot is None and is_useful:
                yield node
            node = node.parent

    def _take(self) -> int | None:
        """A slot for a snapshot. Those that are held do not give way."""
        if not self._slots.num_free and self.num_evictable > self._num_held:
            self.evict()
        return self._slots.take_free()

    def advance(self, path: RadixNode, above: RadixNode, num_tokens: int) -> RadixNode:
        """The first `num_tokens` tokens of the request that has claimed `path` below `above` have
        come back: no more snapshots come from there. Returns the node below which it claims now."""
        return self._demand.advance(path, above, num_tokens)

    def come_back(self, request: Request) -> int:
        """The steps of `request` up to `num_computed` have come back. Returns the number of tokens
        whose pages are of use with the snapshots that it holds."""
        progress = self._running[request]
        while progress.in_flight and progress.in_flight[0].num_tokens <= request.num_computed:
            progress.held.append(progress.in_flight.pop(0))
            self._num_held += 1
        return progress.held[-1].num_tokens if progress.held else 0

    def attach(self, request: Request, path: RadixNode) -> None:
        """Gives the snapshots that `request` holds to the cached nodes of `path` that end there."""
        held = self._running[request].held
        node: RadixNode | None = path
        while held and node is not None and node.parent is not None:
            found = next((one for one in held if one.num_tokens == node.end), None)
            if found is not None and node.is_cached:
                held.remove(found)
                self._num_held -= 1
                self._storage.attach(node, found.slot)
            node = node.parent

    def close(self, request: Request) -> None:
        """The request, without a step in flight, has given to the tree what it could."""
        progress = self._running.pop(request)
        if progress.source is not None:
            self._unpin(progress.source)
        for snapshot in (*progress.in_flight, *progress.held):
            self._slots.put_back(snapshot.slot)
        self._num_held -= len(progress.held)
        self._slots.take_back(request)

    def _unpin(self, node: RadixNode) -> None:
        self._pinned[node] -= 1
        if not self._pinned[node]:
            del self._pinned[node]

    def check(self, holders: Iterable[Request]) -> None:
        """Asserts that each slot has one owner, that pinned snapshots are there, and that the
        cached leaves which no request uses end with one."""
        running = self._running.values()
        slots = [one.slot for two in running for one in (*two.in_flight, *two.held)]
        on_nodes = [node.state_slot for node in self._storage.snapshots]
        self._slots.check_owners(
            holders, [*slots, *(slot for slot in on_nodes if slot is not None)]
        )
        assert len(on_nodes) == len({*on_nodes}) and None not in on_nodes
        assert all(node in self._storage.snapshots for node in self._pinned)
        assert self._num_held == sum(len(one.held) for one in running)
        for node in self._storage.cached_nodes():
            run = node.run
            assert run is not None
            assert (node.state_slot is not None) == (node in self._storage.snapshots)
            is_leaf = not run.num_cached_children and not run.lock_count
            assert node.state_slot is not None or not is_leaf, "a leaf without a snapshot"
