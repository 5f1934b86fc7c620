"""Snapshots of the states of running requests: where they are taken, and who owns their slots.

A chunk that passes a place leaves the state there in a slot of its own as well. When its step has
come back, the snapshot goes to the radix tree with the pages before it, where others begin with it.
Without a slot there is no snapshot, and no request waits for one. Places, all of them ends of nodes
of the request's path:

- the end of the path;
- where waiting requests leave it that find nothing deeper;
- the end of what was cached of it without a snapshot when the request was admitted.

A decode leaves its state behind at each multiple of an interval and goes on in another slot, that
of the last one that it left: no state is copied, and a request has one such snapshot. When the
request ends, its pages up to there go to the tree with it; or, where the request's own state is one
after whole pages, the pages up to its last token with that, and the snapshot before it is freed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sgl_pipeline.microbatch import StateSnapshot
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.snapshot_demand import SnapshotDemand
from sgl_pipeline.scheduling.snapshot_slots import SnapshotSlots
from sgl_pipeline.scheduling.snapshot_storage import SnapshotStorage
from sgl_pipeline.scheduling.state_slots import StateSlots


@dataclass(slots=True)
class _Progress:
    """A running request. Until its first chunk is scheduled it keeps `source`, the node with the
    snapshot that it begins with. `wanted` was cached without one. The steps of snapshots
    `in_flight` have not come back; those `held`, ascending, wait for their pages to be cached. A
    decode has left the last of these, if that is not before `Request.prefill_end`."""

    source: RadixNode | None
    wanted: RadixNode | None
    in_flight: list[StateSnapshot] = field(default_factory=list)
    held: list[StateSnapshot] = field(default_factory=list)


class StateSnapshots:
    """The snapshots of running requests in `slots`, and the nodes of `storage` that keep theirs;
    `giving` says which gives way. Decodes leave snapshots after multiples of `interval` tokens;
    0: they leave none."""

    def __init__(
        self,
        slots: StateSlots,
        giving: SnapshotSlots,
        storage: SnapshotStorage,
        demand: SnapshotDemand,
        interval: int,
    ) -> None:
        self.interval = interval
        self._slots = slots
        self._giving = giving
        self._demand = demand
        self._storage = storage
        self._order = storage.snapshots
        self._running: dict[Request, _Progress] = {}
        # The step that is being put together begins with them, and is not to write their slots.
        self._read: list[RadixNode] = []

    def end_step(self) -> None:
        """A step has its chunks: the next one may write to the slots that they read."""
        for node in self._read:
            self._order.unpin(node)
        self._read.clear()
        self._giving.end_step()

    def open(self, request: Request, path: RadixNode, hit: RadixNode) -> None:
        """Gives an admitted request its slot. It goes on behind `hit`, which is locked."""
        cached = path.last_cached
        progress = _Progress(None, None if cached is hit else cached)
        self._running[request] = progress
        if hit.parent is None:
            self._slots.give(request)
            return
        is_last = not self._slots.num_free and self._slots.num_evictable == 1
        if is_last and not self._order.is_pinned(hit):
            # No other slot is available: the snapshot becomes the request's own state.
            request.state_slot = self._storage.detach(hit)
            return
        self._order.pin(hit)
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
            if (slot := self._giving.take()) is None:
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

    def leave_behind(self, request: Request, cached: RadixNode) -> int | None:
        """The decode of `request`, up to `cached` of which is cached, is being put together: it
        leaves the state after all tokens before it where it is, as a snapshot, and the request goes
        on in another slot, rather in that of its last snapshot in the tree than of another's.
        Returns the slot that it begins with; None: there is no slot to go on in."""
        held, source = self._running[request].held, request.state_slot
        slot: int | None
        if held and held[-1].num_tokens >= request.prefill_end:
            slot = self._giving.let_go(held, held[-1])
        else:
            slot = self._giving.take_after(cached)
        if slot is None:
            return None
        assert source is not None
        self._giving.leave(held, StateSnapshot(request.num_computed, source))
        request.state_slot = slot
        return source

    def advance(self, path: RadixNode, above: RadixNode, num_tokens: int) -> RadixNode:
        """The first `num_tokens` tokens of the request that has claimed `path` below `above` have
        come back: no more snapshots come from there. Returns the node below which it claims now."""
        return self._demand.advance(path, above, num_tokens)

    def come_back(self, request: Request) -> int:
        """The steps of `request` up to `num_computed` have come back. Returns the number of tokens
        whose pages are of use with the snapshots that it holds."""
        progress = self._running[request]
        while progress.in_flight and progress.in_flight[0].num_tokens <= request.num_computed:
            self._giving.hold(progress.held, progress.in_flight.pop(0))
        return progress.held[-1].num_tokens if progress.held else 0

    def settle(self, request: Request) -> int:
        """As `come_back`, for a request without a step in flight that gives its slot back: its own
        state is a snapshot too, if it is one after whole pages."""
        num_held, num_tokens = self.come_back(request), request.num_computed
        progress = self._running[request]
        # What began with a snapshot has a state of its own since its first chunk. Stages may have
        # run a step that was taken back, so that the state is ahead. Of a request that has ended
        # `num_scheduled` tells. Of one that runs nothing does, and its state may go to the tree:
        # with states all pages are lost next (`StepScheduler.forget_in_flight`), and these with it.
        has_state = progress.source is None and request.num_scheduled == num_tokens
        is_new = num_tokens > num_held and num_tokens % self._storage.page_size == 0
        if not has_state or not is_new:
            return num_held
        assert request.state_slot is not None
        self._giving.hold(progress.held, StateSnapshot(num_tokens, request.state_slot))
        request.state_slot = None
        return num_tokens

    def attach(self, request: Request, path: RadixNode) -> None:
        """Gives the snapshots that `request` holds to the cached nodes of `path` that end there."""
        held = self._running[request].held
        node: RadixNode | None = path
        while held and node is not None and node.parent is not None:
            found = next((one for one in held if one.num_tokens == node.end), None)
            if found is not None and node.is_cached:
                self._storage.attach(node, self._giving.let_go(held, found))
            node = node.parent

    def close(self, request: Request) -> None:
        """The request, without a step in flight, has given to the tree what it could."""
        progress = self._running.pop(request)
        if progress.source is not None:
            self._order.unpin(progress.source)
        for snapshot in progress.in_flight:
            self._slots.put_back(snapshot.slot)
        for snapshot in progress.held[:]:
            self._slots.put_back(self._giving.let_go(progress.held, snapshot))
        self._slots.take_back(request)

    def check(self, holders: Iterable[Request]) -> None:
        """Asserts that each slot has one owner, and what must hold of cached snapshots."""
        running = self._running.values()
        held = {one.slot: progress.held for progress in running for one in progress.held}
        in_flight = [one.slot for progress in running for one in progress.in_flight]
        on_nodes = [node.state_slot for node in self._order]
        self._slots.check_owners(
            holders, [*in_flight, *held, *(slot for slot in on_nodes if slot is not None)]
        )
        assert len(on_nodes) == len({*on_nodes}) and None not in on_nodes
        self._giving.check(held)
        self._storage.check_snapshots()
