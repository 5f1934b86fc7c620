"""A ready stage and its store: orders come in between steps, reports go out, whatever it waits for.

The stage is a real one, with a real channel where it must wake.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from support.clusters import host_directory, until
from support.lent_pages import lease_order, stage_leases
from support.local_pipeline import QueueLink, open_stage
from support.page_transfers import NOWHERE, PLACE, WAIT_S, Gate, MemoryStore, load_order, save_order
from support.peers import offer_order
from support.tiny_models import tiny_model

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner import ready_stage
from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.pp_runner.page_store.stage_offers import PeerSite
from sgl_pipeline.pp_runner.ready_stage import ReadyStage
from sgl_pipeline.pp_runner.stage_profile import StageProfile
from sgl_pipeline.pp_runner.worker_inbox import WorkerInbox
from sgl_pipeline.requests import GREEDY
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.attention_messages import attention_door
from sgl_pipeline.wire.channels import SchedulerChannel, WorkerChannel, WorkerEnd
from sgl_pipeline.wire.lease_orders import EndLease, PagesLent
from sgl_pipeline.wire.move_orders import SwitchPlan
from sgl_pipeline.wire.stage_messages import (
    FinishHandover,
    FromWorker,
    Regroup,
    Shutdown,
    StageReport,
    StopProfile,
    ToWorker,
    WorkerHello,
)
from sgl_pipeline.wire.stage_orders import OrderStream, StageOrder
from sgl_pipeline.wire.step_order import ChunkOrder, RequestOpen, StepOrder
from sgl_pipeline.wire.store_orders import (
    PagesLoaded,
    PagesSaved,
    PeerPlace,
    PeerStage,
    UseStore,
    WithdrawPages,
)

PLAN, LAYERS = StagePlan(0, (6,)), 6


class IdleMover:
    """No layer moves; notes the orders that it gets, and what `look` sees at that moment."""

    is_open = awaits_pages = False

    def __init__(self, look: Callable[[], object] = lambda: None) -> None:
        self.noted: list[tuple[str, object]] = []
        self._look = look

    def _note(self, order: object) -> None:
        self.noted.append((type(order).__name__, self._look()))

    prepare = switch = abandon = obey = regroup = _note

    def wrote(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        assert not list(slots), "slots in a model without states"
        if pages:
            self.noted.append(("wrote", tuple(pages)))

    def work(self) -> bool:
        return False

    def send_rest(self) -> bool:
        return True


class Stage:
    """A stage of the tiny model, ready, with `store`, which peers reach at `site`."""

    def __init__(
        self,
        channel: WorkerEnd,
        store: MemoryStore,
        plan: StagePlan = PLAN,
        stage: int = 0,
        site: PeerSite = NOWHERE,
    ) -> None:
        self.may_start = True
        self.rows: deque = deque()
        link = QueueLink(self.rows, deque())
        self.runner = open_stage(tiny_model("llama"), plan, stage, link, num_pages=8)
        kv_pool = self.runner.held_layers.kv_pool
        self.leases = stage_leases(
            kv_pool, self.runner.shapes, site.run_directory, attention_door(site.door)
        )
        self.transfers = PageTransfers(
            stage,
            kv_pool,
            lambda: plan,
            lambda: self.may_start,
            site,
            lambda place, sizes: store,
            self.leases,
        )
        self.mover: Any = IdleMover(lambda: self.transfers.is_open)
        self.ready = ReadyStage(
            0,
            channel,
            WorkerInbox(channel),
            self.runner,
            self.mover,
            self.transfers,
            StageProfile(stage, has_gpu=False),
            self.mover.regroup,
        )


class LiveStage(Stage):
    """It serves in a thread of its own, until `leave`."""

    def __init__(
        self,
        directory: Path,
        store: MemoryStore,
        plan: StagePlan = PLAN,
        stage: int = 0,
        site: PeerSite = NOWHERE,
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = f"ipc://{directory}/channel"
        self.scheduler = SchedulerChannel(self.context, address)
        self.channel = WorkerChannel(self.context, address, 0)
        super().__init__(self.channel, store, plan, stage, site)
        self.channel.send(WorkerHello(
            worker=0, host="", cores=(), num_gpus=0, memory_bytes=0, version=""
        ))  # fmt: skip
        assert isinstance(self.next_report(), WorkerHello)
        self.stream = OrderStream()
        self.thread = threading.Thread(target=self.ready.serve, daemon=True)
        self.thread.start()

    def order(self, *orders: StageOrder) -> None:
        for order in orders:
            self.scheduler.send(0, self.stream.seal(order))

    def next_report(self) -> FromWorker:
        assert self.scheduler.wait(int(WAIT_S * 1e3)), "no report came"
        received = self.scheduler.receive()
        assert received is not None
        return received[1]

    def leave(self) -> None:
        self.scheduler.send(0, Shutdown())
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.transfers.close()
        self.channel.close()
        self.scheduler.close()
        self.context.term()


@pytest.fixture(autouse=True)
def _no_timed_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that waits is woken, or waits for ever."""
    monkeypatch.setattr(ready_stage, "LEAVE_POLL_MS", 10**7)


@contextmanager
def live_stage(
    directory: Path, store: MemoryStore, *split: Any, **site: PeerSite
) -> Iterator[LiveStage]:
    stage = LiveStage(directory, store, *split, **site)
    try:
        yield stage
    finally:
        stage.leave()


def step(step_id: int, page: int = 0) -> StepOrder:
    """One token of a request of its own."""
    opened = RequestOpen(step_id, GREEDY, 1)
    chunk = ChunkOrder(step_id, 0, 1, True, b"\1\0\0\0", page.to_bytes(4, "little"))
    return StepOrder(step_id, 0, (), (opened,), (chunk,))


def test_the_end_of_a_transfer_wakes_a_stage_without_work(tmp_path: Path) -> None:
    store = MemoryStore()
    with live_stage(tmp_path, store) as stage:
        stage.order(UseStore(PLACE), step(0), save_order(4, [0, 2], [20, 22]))
        assert {type(stage.next_report()) for _ in range(2)} == {StageReport, PagesSaved}
        stage.order(load_order(5, [6, 7], [20, 22], store.checksums([20, 22], LAYERS)))
        loaded = stage.next_report()
        assert isinstance(loaded, PagesLoaded)
        assert (loaded.transfer, loaded.num_pages, loaded.message) == (5, 2, "")
        for layer in range(LAYERS):
            for pages in stage.runner.held_layers.kv_pool.pages(layer):
                assert pages[0].any() and torch.equal(pages[0], pages[6])
        assert stage.mover.noted == [("wrote", (6, 7))]


def test_steps_and_reports_go_on_beside_transfers(tmp_path: Path) -> None:
    gate = Gate()
    with live_stage(tmp_path, MemoryStore(gate)) as stage:
        stage.order(UseStore(PLACE), save_order(4, [7], [20]), step(0))
        gate.await_one()
        assert isinstance(stage.next_report(), StageReport)
        gate.open()
        stage.order(step(1), step(2))
        reports = [stage.next_report() for _ in range(3)]
        assert sorted(type(one).__name__ for one in reports) == [
            "PagesSaved", "StageReport", "StageReport",
        ]  # fmt: skip


def test_a_stage_that_waits_for_rows_sends_reports(tmp_path: Path) -> None:
    gate = Gate()
    with live_stage(tmp_path, MemoryStore(gate), StagePlan(0, (3, 3)), 1) as stage:
        stage.order(UseStore(PLACE), save_order(4, [7], [20]), step(0))
        gate.await_one()
        gate.open()
        saved = stage.next_report()
        assert isinstance(saved, PagesSaved) and saved.layers == (3, 6)
        stage.rows.append((0, torch.ones(1, 64)))
        stage.scheduler.send(0, StopProfile())  # it looks for rows again
        assert isinstance(stage.next_report(), StageReport)


class ScriptedChannel:
    """Gives messages one after the other; calls what is not one."""

    def __init__(self, messages: Sequence[ToWorker | Callable[[], object]]) -> None:
        self.sent: list[Any] = []
        self.messages = deque(messages)

    def send(self, message: FromWorker) -> None:
        self.sent.append(message)

    def wait(self, descriptors: Iterable[int], timeout_s: float | None = None) -> None:
        raise AssertionError("messages are there")

    def receive(self, timeout_ms: int | None = None) -> ToWorker | None:
        while callable(self.messages[0]):
            self.messages.popleft()()  # type: ignore[operator]
        return self.messages.popleft()  # type: ignore[return-value]


@pytest.mark.parametrize(
    "interrupt", [SwitchPlan(1, PLAN), Regroup(1, PLAN, ())], ids=["switch", "regroup"]
)
def test_transfers_are_forgotten_before_the_plan_or_the_stream_changes(
    interrupt: SwitchPlan | Regroup,
) -> None:
    gate, stream = Gate(), OrderStream()
    first = [stream.seal(one) for one in (UseStore(PLACE), save_order(4, [7], [20]))]
    end = interrupt if isinstance(interrupt, Regroup) else stream.seal(interrupt)
    channel = ScriptedChannel([*first, gate.await_one, end, gate.open, Shutdown()])
    stage = Stage(channel, MemoryStore(gate))
    stage.ready.serve()
    assert stage.mover.noted == [(type(interrupt).__name__, False)]
    assert channel.sent == []
    stage.transfers.close()


def test_the_end_of_a_handover_refuses_what_the_successor_would_not_get() -> None:
    store, stream = MemoryStore(), OrderStream()
    orders = [
        UseStore(PLACE),
        save_order(4, [7], [20]),
        load_order(5, [3], [20], [0] * LAYERS),
        load_order(6, [4], [20], [0] * LAYERS),
    ]
    gate = Gate()
    sealed = [stream.seal(order) for order in orders]
    channel = ScriptedChannel([*sealed, gate.await_one, FinishHandover(0), gate.open, Shutdown()])
    store._on_access = gate
    stage = Stage(channel, store)
    stage.ready.serve()
    assert sorted((one.transfer, one.num_pages, one.message) for one in channel.sent) == [
        (transfer, 0, "the stage is handed over to another worker") for transfer in (4, 5, 6)
    ]
    assert stage.mover.noted == [("FinishHandover", False)]
    stage.transfers.close()


def test_a_page_that_was_loaded_in_time_belongs_to_the_handover() -> None:
    store, stream = MemoryStore(), OrderStream()
    save = stream.seal(UseStore(PLACE)), stream.seal(save_order(4, [7], [20]))
    channel = ScriptedChannel([])
    stage = Stage(channel, store)

    def until_done() -> None:
        end_s = time.monotonic() + WAIT_S
        while stage.transfers.is_open and not stage.transfers._done:
            assert time.monotonic() < end_s

    def load() -> None:
        order = load_order(5, [3], [20], store.checksums([20], LAYERS))
        channel.messages.appendleft(stream.seal(order))

    channel.messages.extend([*save, until_done, StopProfile(), load])
    channel.messages.extend([until_done, FinishHandover(0), Shutdown()])
    stage.ready.serve()
    assert stage.mover.noted == [("wrote", (3,)), ("FinishHandover", False)]
    assert [one.num_pages for one in channel.sent if isinstance(one, PagesLoaded)] == [1]
    stage.transfers.close()


INTERRUPTS = pytest.mark.parametrize(
    "interrupt",
    [SwitchPlan(1, PLAN), Regroup(1, PLAN, ()), FinishHandover(0), UseStore(None)],
    ids=["switch", "regroup", "handover", "another store"],
)


@INTERRUPTS
def test_offers_are_made_in_the_stream_and_forgotten_where_transfers_are(
    tmp_path: Path, interrupt: SwitchPlan | Regroup | FinishHandover | UseStore
) -> None:
    stream, seen = OrderStream(), list[object]()
    first = [stream.seal(offer_order(number, [7], [20])) for number in (4, 5)]
    first.append(stream.seal(WithdrawPages(5)))
    end = stream.seal(interrupt) if isinstance(interrupt, SwitchPlan | UseStore) else interrupt
    again = stream.seal(offer_order(4, [7], [20]))

    def look() -> None:
        seen.append([stage.transfers._offers._offered.is_offered(number) for number in (4, 5)])

    channel = ScriptedChannel([*first, look, end, look, again, look, Shutdown()])
    stage = Stage(channel, MemoryStore(), site=PeerSite(host_directory(tmp_path / "run"), "door"))
    stage.mover._look = look
    stage.ready.serve()
    at_the_mover = [] if isinstance(interrupt, UseStore) else [[False, False]]
    assert seen == [[True, False], *at_the_mover, [False, False], [True, False]]
    assert channel.sent == []
    stage.transfers.close()


@INTERRUPTS
def test_leases_begin_in_the_stream_with_a_report_and_are_forgotten_where_offers_are(
    tmp_path: Path, interrupt: SwitchPlan | Regroup | FinishHandover | UseStore
) -> None:
    stream, seen = OrderStream(), list[object]()
    orders = [lease_order(4, [7, 2], 1), lease_order(5, [7, 3], 1), EndLease(5)]
    first = [stream.seal(order) for order in orders]
    end = stream.seal(interrupt) if isinstance(interrupt, SwitchPlan | UseStore) else interrupt
    others = [stream.seal(order) for order in (EndLease(4), lease_order(6, [7, 2], 1))]

    def look() -> None:
        seen.append([stage.leases._leases.is_lent(number) for number in (4, 5, 6)])

    channel = ScriptedChannel([*first, look, end, look, *others, look, Shutdown()])
    stage = Stage(channel, MemoryStore(), site=PeerSite(host_directory(tmp_path / "run"), "door"))
    stage.mover._look = look
    stage.ready.serve()
    at_the_mover = [] if isinstance(interrupt, UseStore) else [[False] * 3]
    assert seen == [[True, False, False], *at_the_mover, [False] * 3, [False, False, True]]
    assert channel.sent == [PagesLent(2, number) for number in (4, 5, 6)]
    stage.transfers.close()


def test_a_stage_without_work_begins_a_lease_when_pages_have_arrived(tmp_path: Path) -> None:
    site = PeerSite(host_directory(tmp_path / "run"), "door")
    with live_stage(tmp_path, MemoryStore(), site=site) as stage:
        stage.may_start, stage.mover.is_open = False, True  # layers have moved, not all pages
        stage.order(lease_order(4, [7, 2], 1))
        until(lambda: stage.leases.is_open)
        assert not stage.leases._leases.is_lent(4)
        stage.may_start = True
        assert stage.next_report() == PagesLent(2, 4)
        stage.mover.is_open = False


def test_leases_are_found_at_the_newest_peers_also_while_no_pages_are_read() -> None:
    stream, seen = OrderStream(), list[str]()
    old, new = (
        PeerPlace(name=name, digest="ukv1-0", stages=(PeerStage("host:1/door", (0, 6)),))
        for name in "PQ"
    )
    orders = [UseStore(None, (old,)), UseStore(None), SwitchPlan(1, PLAN), UseStore(None, (new,))]

    def look() -> None:
        seen.append("".join(stage.runner.offload._peers))

    looks = [one for order in orders for one in (stream.seal(order), look)]
    channel = ScriptedChannel([*looks, Shutdown()])
    stage = Stage(channel, MemoryStore())
    stage.ready.serve()
    assert seen == ["P", "P", "P", "Q"]
    stage.transfers.close()


def test_a_lease_on_a_stage_that_lends_nothing_breaks_the_protocol() -> None:
    stage = Stage(ScriptedChannel([]), MemoryStore())
    transfers = PageTransfers(
        0, stage.runner.held_layers.kv_pool, lambda: PLAN, lambda: True, NOWHERE
    )
    for order in (lease_order(4, [7, 2], 1), EndLease(4)):
        with pytest.raises(ProtocolError, match="lends none"):
            transfers.obey_lease(order)
    for one in (transfers, stage.transfers):
        one.close()


def test_a_stage_without_work_makes_an_offer_when_pages_have_arrived(tmp_path: Path) -> None:
    site = PeerSite(host_directory(tmp_path / "run"), "door")
    with live_stage(tmp_path, MemoryStore(), site=site) as stage:
        offers = stage.transfers._offers
        stage.may_start, stage.mover.is_open = False, True  # layers have moved, not all pages
        stage.order(offer_order(4, [7], [20]))
        until(lambda: offers.has_held_back)
        assert not offers._offered.is_offered(4)
        stage.may_start = True
        until(lambda: offers._offered.is_offered(4))
        stage.mover.is_open = False


def test_a_transfer_without_a_store_breaks_the_protocol() -> None:
    channel = ScriptedChannel([OrderStream().seal(save_order(4, [7], [20])), Shutdown()])
    stage = Stage(channel, MemoryStore())
    with pytest.raises(ProtocolError, match="no store is in use"):
        stage.ready.serve()
    stage.transfers.close()


def test_a_place_travels_with_its_order() -> None:
    order = UseStore(PLACE)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=UseStore) == order
    slow = msgspec.structs.replace(PLACE, save_bytes_per_s=0)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(UseStore(slow)), type=UseStore)
