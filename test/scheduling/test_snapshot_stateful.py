"""Random traffic with states and the radix cache: counts, hits and parking are those counted anew
after each operation, and what breaks the rules of snapshots is found."""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.pipelines import make_request
from support.snapshot_oracle import check_slots_in_flight, check_snapshot_demand

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.snapshot_demand import SnapshotDemand
from sgl_pipeline.scheduling.snapshot_order import SnapshotOrder
from sgl_pipeline.scheduling.state_snapshots import StateSnapshots
from sgl_pipeline.wire.step_order import ChunkOrder, StepOrderEncoder
from test.scheduling.test_step_scheduler_stateful import ABORTED, SchedulerMachine

# Of a request that `run_until_one_leaves` adds, and whether decodes are to leave the snapshot.
CHAT = {
    "prompt_ids": st.lists(st.integers(0, 1), min_size=3, max_size=9),
    "count": st.integers(1, 9),
    "decodes": st.booleans(),
}


class SnapshotMachine(SchedulerMachine):
    """The same traffic, always with snapshots, in other respects with fewer settings."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(4, 20),
        num_stages=st.integers(1, 3),
        duplicate_prefills=st.sampled_from([False, False, True]),
        max_prefill_tokens=st.sampled_from([1, 3, 8, 64]),
        num_state_slots=st.sampled_from([1, 2, 3, 5, 9]),
        track_pages=st.sampled_from([0, 1, 1, 2]),
        preemption_threshold=st.sampled_from([None, 0]),
        fair_shares_by=st.sampled_from([None, "user"]),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        num_stages: int,
        duplicate_prefills: bool,
        max_prefill_tokens: int,
        num_state_slots: int,
        track_pages: int,
        preemption_threshold: int | None,
        fair_shares_by: str | None,
    ) -> None:
        SchedulerMachine.start(
            self,
            page_size=page_size,
            num_pages=num_pages,
            num_stages=num_stages,
            extra=0,
            radix_cache=True,
            policy="sarathi",
            accounting="radix",
            schedule_policy="fcfs",
            max_overtakes=0,
            duplicate_prefills=duplicate_prefills,
            max_prefill_tokens=max_prefill_tokens,
            max_running=16,
            num_state_slots=num_state_slots,
            track_pages=track_pages,
            max_queued=None,
            max_decodes=None,
            preemption_threshold=preemption_threshold,
            draft_tokens=0,
            fair_shares_by=fair_shares_by,
            timeouts_s=(None, None),
            costs=None,
            dynamic_chunking=False,
            targets_ms=(None, None),
        )

    @rule(
        prefix=st.lists(st.integers(0, 1), min_size=4, max_size=8),
        ends=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=2, max_size=4),
        count=st.integers(0, 3),
    )
    def add_with_shared_prefix(self, prefix: list[int], ends: list[list[int]], count: int) -> None:
        self.add_plain([*prefix, 0])
        self.run_steps(count)
        for end in ends:
            self.add_plain([*prefix, *end])

    @precondition(lambda self: any(one.finish for one in self.added))
    @rule(data=st.data(), count=st.integers(1, 9))
    def add_next_turn(self, data: st.DataObject, count: int) -> None:
        last = data.draw(st.sampled_from([one for one in self.added if one.finish]))
        self.add_plain([*last.prompt_ids, *last.output_ids, 1], count)

    @rule(**CHAT, data=st.data())
    def abort_one_that_leaves_a_snapshot(
        self, prompt_ids: list[int], count: int, decodes: bool, data: st.DataObject
    ) -> None:
        if leaving := self.run_until_one_leaves(prompt_ids, count, decodes):
            request = data.draw(st.sampled_from(leaving))
            assert self.scheduler.abort(request.request_id, ABORTED) is request

    @rule(**CHAT, num_state_slots=st.sampled_from([None, None, 1, 2, 5]))
    def lose_stages_while_a_snapshot_is_left(
        self, prompt_ids: list[int], count: int, decodes: bool, num_state_slots: int | None
    ) -> None:
        if self.run_until_one_leaves(prompt_ids, count, decodes):
            self.pipeline.lose_stages(num_state_slots)
            slots = self.scheduler.state_slots
            assert slots.num_free == slots.num_slots
            assert num_state_slots in (None, slots.num_slots)

    @rule(**CHAT, flushes=st.booleans())
    def flush_while_a_snapshot_is_left(
        self, prompt_ids: list[int], count: int, decodes: bool, flushes: bool
    ) -> None:
        """Nothing is flushed before its step has come back, and then all is."""
        scheduler = self.scheduler
        if not self.run_until_one_leaves(prompt_ids, count, decodes):
            return
        scheduler.pausing.pause(retract=True)
        while self.pipeline.steps_in_flight:
            assert not scheduler.flush_cache()
            self.pipeline.complete()
            scheduler.check_invariants()
            self.counts_are_those_counted_anew()
        if flushes:
            assert scheduler.flush_cache()
            assert scheduler.state_slots.num_free == scheduler.state_slots.num_slots
            assert scheduler.num_free_pages == scheduler.load().total_pages
        scheduler.pausing.resume()

    @rule(**CHAT, data=st.data())
    def retract_one_that_holds_a_snapshot(
        self, prompt_ids: list[int], count: int, decodes: bool, data: st.DataObject
    ) -> None:
        """It goes on behind that, which may be all that the cache has of it."""
        scheduler = self.scheduler
        if not self.run_until_one_leaves(prompt_ids, count, decodes):
            return
        while self.pipeline.steps_in_flight:
            self.pipeline.complete()
        held = {
            request: progress.held[-1].num_tokens
            for request, progress in scheduler._pages.snapshots._running.items()  # type: ignore[union-attr]
            if progress.held and not request.steps_in_flight
        }
        if held:
            request = data.draw(st.sampled_from([*held]))
            scheduler._preemption.retract(request)
            path = scheduler._waiting.path_of(request)
            assert scheduler._pages.storage.match(path).end >= min(held[request], path.end)

    def run_until_one_leaves(
        self, prompt_ids: list[int], count: int, decodes: bool
    ) -> list[Request]:
        """Adds a request and runs until chunks in flight, decodes or others, leave a snapshot of
        their requests, which it returns; of none if it takes too long."""
        self.scheduler.pausing.resume()
        self.add_plain(prompt_ids, count)
        for _ in range(20):
            self.pipeline.fill()
            chunks = [chunk for step in self.scheduler._in_flight for chunk in step.chunks]
            leaving = [
                one.request
                for one in chunks
                if one.request.finish is None
                and one.is_decode == decodes
                and (one.snapshots or (decodes and one.state_source is not None))
            ]
            if leaving or not chunks:
                return leaving
            self.pipeline.complete()
            self.counts_are_those_counted_anew()
        return []

    def add_plain(self, prompt_ids: list[int], count: int = 2) -> None:
        request = make_request(str(len(self.added)), prompt_ids, count)
        request.arrival_s = self.pipeline.now_s
        if len(prompt_ids) + count - 1 <= self.pool_tokens:
            self.scheduler.add(request)
            self.added.append(request)

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.pipeline.fill()
            if self.pipeline.steps_in_flight:
                self.pipeline.complete()
            self.counts_are_those_counted_anew()

    @invariant()
    def counts_are_those_counted_anew(self) -> None:
        check_snapshot_demand(self.scheduler)
        check_slots_in_flight(self.scheduler)


TestSnapshotsUnderRandomTraffic = SnapshotMachine.TestCase
TestSnapshotsUnderRandomTraffic.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

# Random, but the same in every run; nothing is made smaller.
FIXED = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


def _without_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot may be evicted before its reader has begun."""
    monkeypatch.setattr(SnapshotOrder, "pin", SnapshotOrder.use)
    monkeypatch.setattr(SnapshotOrder, "unpin", lambda *_: None)


def _matchable_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot may be matched while the step that writes it is in flight."""
    come_back = StateSnapshots.come_back

    def hasty(self: StateSnapshots, request: Request) -> int:
        progress = self._running[request]
        for one in progress.in_flight:
            self._giving.hold(progress.held, one)
        progress.in_flight.clear()
        return come_back(self, request)

    monkeypatch.setattr(StateSnapshots, "come_back", hasty)


def _freed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot of a snapshot is free while a node still has it."""
    attach = StateSnapshots.attach

    def careless(self: StateSnapshots, request, path):  # type: ignore[no-untyped-def]
        held = list(self._running[request].held)
        attach(self, request, path)
        for one in held:
            if one not in self._running[request].held:
                self._slots._free[one.slot] = None

    monkeypatch.setattr(StateSnapshots, "attach", careless)


def _claims_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are parked at nodes that nobody brings any more."""

    def stays(
        self: SnapshotDemand, path: RadixNode, above: RadixNode, num_tokens: int
    ) -> RadixNode:
        node = path
        while node is not above and node.end > num_tokens:
            assert node.parent is not None
            node = node.parent
        return node

    monkeypatch.setattr(SnapshotDemand, "advance", stays)


def _not_counted_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new or a lost snapshot means for the nodes above is forgotten."""
    monkeypatch.setattr(SnapshotDemand, "_walk_up", lambda *_: None)


def _not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upper half of a split node has no counts."""
    monkeypatch.setattr(SnapshotDemand, "_on_split", staticmethod(lambda *_: None))


def _left_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode leaves its state behind and goes on in the same slot."""
    leave_behind = StateSnapshots.leave_behind

    def stays(self: StateSnapshots, request: Request, cached: RadixNode) -> int | None:
        slot = request.state_slot
        source = leave_behind(self, request, cached)
        if source is not None:
            self._slots._free[request.state_slot] = None  # type: ignore[index]
            request.state_slot = slot
        return None

    monkeypatch.setattr(StateSnapshots, "leave_behind", stays)


def _left_a_token_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a decode leaves is said to be the state after its own token."""
    leave_behind = StateSnapshots.leave_behind

    def early(self: StateSnapshots, request: Request, cached: RadixNode) -> int | None:
        request.num_computed += self._storage.page_size
        source = leave_behind(self, request, cached)
        request.num_computed -= self._storage.page_size
        return source

    monkeypatch.setattr(StateSnapshots, "leave_behind", early)


def _gives_way_in_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a decode leaves may be written in the step that reads it."""
    leave_behind = StateSnapshots.leave_behind

    def at_once(self: StateSnapshots, request: Request, cached: RadixNode) -> int | None:
        source = leave_behind(self, request, cached)
        self._giving.end_step()
        return source

    monkeypatch.setattr(StateSnapshots, "leave_behind", at_once)


def _settled_between_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's own state is said to be the one after its whole pages."""
    settle = StateSnapshots.settle

    def rounded(self: StateSnapshots, request: Request) -> int:
        size, num_tokens = self._storage.page_size, request.num_computed
        if request.num_scheduled != num_tokens:
            return settle(self, request)
        request.num_scheduled = request.num_computed = num_tokens // size * size
        num_settled = settle(self, request)
        request.num_scheduled = request.num_computed = num_tokens
        return num_settled

    monkeypatch.setattr(StateSnapshots, "settle", rounded)


def _slot_told_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages go on in the slot that a request has left."""
    monkeypatch.setattr(StepOrderEncoder, "_chunk", _without_slot(StepOrderEncoder._chunk))


def _without_slot(
    chunk_of: Callable[[StepOrderEncoder, Chunk], ChunkOrder],
) -> Callable[[StepOrderEncoder, Chunk], ChunkOrder]:
    def forgetful(self: StepOrderEncoder, chunk: Chunk) -> ChunkOrder:
        return msgspec.structs.replace(chunk_of(self, chunk), state_slot=None)

    return forgetful


def test_nothing_is_found_in_the_same_traffic_as_it_is() -> None:
    """In as many examples as the mutation that is found last takes, about; more of them, new ones
    in each run, are those of `TestSnapshotsUnderRandomTraffic`."""
    run_state_machine_as_test(SnapshotMachine, settings=settings(FIXED, max_examples=100))


@pytest.mark.parametrize(
    "mutate",
    [
        _without_pins,
        _matchable_at_once,
        _freed_twice,
        _claims_stay,
        _not_counted_above,
        _not_split,
        _left_while_it_is_written,
        _left_a_token_early,
        _gives_way_in_its_step,
        _settled_between_pages,
        _slot_told_late,
    ],
)
def test_what_breaks_the_rules_is_found(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    # A stage that asserts is seen as one whose report is missing.
    with pytest.raises((AssertionError, KeyError, ProtocolError)):
        run_state_machine_as_test(SnapshotMachine, settings=FIXED)
