"""Prefill and decode servers without processes: real schedulers and rooms, fake stages and streams.

Stages hold what `stored_pipeline.py` says; those of a decode server read offered pages out of those
of a prefill server, which assert that no step writes into what they offer. Streams between the
schedulers delay, and where a test wants it lose and repeat, what they carry. `test/fault_schedules`
has servers whose workers fail at any moment.
"""

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from support.pipelines import make_request, new_scheduler
from support.stored_pipeline import (
    NUM_LAYERS,
    PAGE_SIZE,
    PLACE,
    RULES,
    MemoryStore,
    StoredPipeline,
    StoredStage,
    right_output,
)

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.disaggregation.decode_rooms import DecodeRooms
from sgl_pipeline.disaggregation.identity import ServerIdentity
from sgl_pipeline.disaggregation.prefill_rooms import PrefillRooms
from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.errors import RequestError
from sgl_pipeline.pipeline.offload_rule import OffloadRule
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.requests import FinishReason, Request, Room
from sgl_pipeline.scheduling import RecoveryLog
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.lease_orders import EndLease, LendPages, PagesLent
from sgl_pipeline.wire.stage_messages import StageReport
from sgl_pipeline.wire.step_order import INT32, MirroredChunk, StepOrder
from sgl_pipeline.wire.store_orders import (
    EndLoad,
    LoadPages,
    OfferPages,
    PagesLoaded,
    PeerPlace,
    PeerStage,
    SavePages,
    StoreReport,
    UseStore,
    WithdrawPages,
)

IDENTITY = ServerIdentity(
    name="a server", digest="d", page_size=PAGE_SIZE, num_layers=NUM_LAYERS, kv_dtype="bfloat16"
)
# Where the stages of all servers are, by address; None: its process is gone.
Network = dict[str, "RoomStage"]


class RoomStage(StoredStage):
    """A stage that offers pages, or reads those of others."""

    def __init__(
        self, stage: int, layers: range, num_pages: int, store: MemoryStore, network: Network
    ) -> None:
        super().__init__(stage, layers, num_pages, store)
        self._network = network
        self._peers: dict[str, PeerPlace] = {}
        # Those that attention goes to: a `UseStore` without peers does not change them.
        self._lenders: dict[str, PeerPlace] = {}
        self.offers: dict[int, dict[bytes, int]] = {}
        # Pages of a lease, and the first that may be written.
        self.leases: dict[int, tuple[list[int], int]] = {}

    def forget_stream(self) -> None:
        super().forget_stream()
        self.offers.clear()
        self.leases.clear()

    def next_order(self) -> StageReport | PagesLent | StoreReport | None:  # type: ignore[override]
        order = self._reader.open(self.inbox.popleft())
        if isinstance(order, UseStore):
            self.transfers.clear()
            self.offers.clear()
            self.leases.clear()
            self._peers = {peer.name: peer for peer in order.peers}
            self._lenders = self._peers or self._lenders
        elif isinstance(order, EndLoad):
            ended = [one.transfer for one in self.transfers]
            if order.transfer in ended:
                return self.end_transfer(ended.index(order.transfer), can_write=False)
        elif isinstance(order, LendPages):
            assert order.lease not in self.leases, "a lease was made twice"
            self.leases[order.lease] = ([*array(INT32, order.pages)], order.first_own)
            return PagesLent(self.stage, order.lease)
        elif isinstance(order, EndLease):
            assert self.leases.pop(order.lease, None) is not None, "no lease to end"
        elif isinstance(order, OfferPages):
            assert order.offer not in self.offers, "an offer was made twice"
            hashes = [order.hashes[at : at + 32] for at in range(0, len(order.hashes), 32)]
            pages = array(INT32, order.pages)
            self.offers[order.offer] = dict(zip(hashes, pages, strict=True))
        elif isinstance(order, WithdrawPages):
            assert self.offers.pop(order.offer, None) is not None, "nothing to withdraw"
        elif isinstance(order, SavePages):
            self.transfers.append(order)
        elif isinstance(order, LoadPages):
            assert not order.source or (order.source in self._peers and not order.checksums)
            self._assert_not_offered(array(INT32, order.pages))
            self.transfers.append(order)
        else:
            return self.obey(order)
        return None

    def _run(self, order: StepOrder) -> StageReport:
        report = super()._run(order)
        for pages, start, end in self.written:
            self._assert_not_offered(pages[start // PAGE_SIZE : -(-end // PAGE_SIZE)])
        return report

    def _assert_not_offered(self, pages: Sequence[int]) -> None:
        offered = {page for offer in self.offers.values() for page in offer.values()}
        offered |= {page for pages, _ in self.leases.values() for page in pages}
        assert offered.isdisjoint(pages), "a page is written that peers may read"

    def attend_elsewhere(self, chunk: MirroredChunk) -> bool:
        lease, start, end = chunk.request.lease, chunk.start, chunk.start + chunk.length
        assert lease is not None and len(chunk.request.pages) == 1
        assert start // PAGE_SIZE == (end - 1) // PAGE_SIZE, "its rows have one page here"
        lender = self._lenders.get(lease.source)
        stages = () if lender is None else lender.stages
        for layer in self.layers:
            found = [one for one in stages if layer in range(*one.layers)]
            executor = self._network.get(found[0].address) if found else None
            if executor is None or not executor.attend(layer, lease.number, chunk):
                return False
        return True

    def attend(self, layer: int, lease: int, chunk: MirroredChunk) -> bool:
        """Writes the rows of a peer's chunk, and reads what is before them; False if it cannot."""
        if lease not in self.leases or layer not in self.layers:
            return False
        pages, first_own = self.leases[lease]
        tokens, end = tuple(chunk.request.tokens), chunk.start + chunk.length
        assert first_own * PAGE_SIZE <= chunk.start and end <= len(pages) * PAGE_SIZE
        right = [tokens[: position + 1] for position in range(end)]
        self._extend(layer, pages, chunk.start, right)
        return True

    def page_of(self, offer: int, page_hash: bytes, layer: int) -> Any:
        """What a peer reads; None: it is not offered."""
        page = self.offers.get(offer, {}).get(page_hash)
        return None if page is None else self._slots[layer][page][:]

    def end_transfer(self, index: int, *, can_write: bool = True) -> StoreReport:
        """Reads what is there now, up to a page that some stage does not offer."""
        order = self.transfers[index]
        if not isinstance(order, LoadPages) or not order.source:
            return super().end_transfer(index, can_write=can_write)
        del self.transfers[index]
        hashes = [order.hashes[at : at + 32] for at in range(0, len(order.hashes), 32)]
        num_pages = 0
        for page, page_hash in zip(array(INT32, order.pages), hashes, strict=True):
            found = {layer: self._read(order, page_hash, layer) for layer in self.layers}
            if not can_write or None in found.values():
                break
            for layer, slots in found.items():
                self._slots[layer][page] = slots
            num_pages += 1
        return PagesLoaded(
            stage=self.stage,
            transfer=order.transfer,
            num_pages=num_pages,
            num_bytes=num_pages,
            busy_s=0.01,
            message="" if num_pages == len(hashes) else "not offered",
        )

    def _read(self, order: LoadPages, page_hash: bytes, layer: int) -> Any:
        for stage in self._peers[order.source].stages:
            if layer in range(*stage.layers):
                peer = self._network.get(stage.address)
                # Where layers have moved, another stage has them.
                if peer is None or layer not in peer.layers:
                    return None
                return peer.page_of(order.offer, page_hash, layer)
        raise AssertionError("no stage has the layer")


class RoomServer(StoredPipeline):
    """A server of either kind, driven by hand."""

    def __init__(
        self,
        name: str,
        network: Network,
        layer_counts: tuple[int, ...],
        num_pages: int,
        log_pages: int | None,
        now_s: float,
        store: MemoryStore | None,
        draft_tokens: int,
    ) -> None:
        self.name, self._network = name, network
        plan = StagePlan(0, layer_counts)
        log = None if log_pages is None else RecoveryLog(plan.num_stages, PAGE_SIZE, log_pages)
        scheduler = new_scheduler(
            SchedulingArgs(page_size=PAGE_SIZE, draft_tokens=draft_tokens),
            num_pages=num_pages,
            num_stages=plan.num_stages,
            context_length=num_pages * PAGE_SIZE,
            log=log,
        )
        self.core = PipelineCore(scheduler, plan, vocab_size=7)
        self.tier, self.now_s = scheduler.tier, now_s
        self._num_pages, self._log_pages = num_pages, log_pages or 0
        self._incarnation = 0
        self.requests: list[Request] = []
        self.lookups = []
        self.store = store or MemoryStore()
        self.answered: set[Request] = set()
        self._build()
        if store is not None:
            self.tier.use(PLACE, RULES)

    def run_order(self, stage: int) -> None:
        inbox = self.stages[stage].inbox
        if inbox and (stage == 0 or len(self.stages[stage - 1].inbox) < len(inbox)):
            report = self.stages[stage].next_order()
            if isinstance(report, PagesLent):
                self.core.take_lease_report(report)
            elif isinstance(report, StageReport):
                self.core.take_report(report, self.now_s)
            elif report is not None:
                self.core.take_store_report(report)

    def _build(self) -> None:
        self.stages = [self._new_stage(one) for one in range(self.core.plan.num_stages)]
        self._join_stages()

    def _new_stage(self, stage: int) -> RoomStage:
        layers = self.core.plan.layers_of(stage)
        own = range(layers.start, layers.stop)
        made = RoomStage(stage, own, self._num_pages, self.store, self._network)
        self._network[f"{self.name}/{stage}"] = made
        return made

    @property
    def places(self) -> tuple[PeerStage, ...]:
        plan = self.core.plan
        return tuple(
            PeerStage(f"/{stage}", (layers.start, layers.stop))
            for stage, layers in ((one, plan.layers_of(one)) for one in range(plan.num_stages))
        )

    def regroup(self, layer_counts: tuple[int, ...]) -> None:
        """All stages are lost, and as many as `layer_counts` has fill in."""
        core = self.core
        core.halt(range(core.plan.num_stages), "lost", self.now_s)
        plan = StagePlan(core.plan.epoch + 1, layer_counts)
        core.use_stages(plan, (NUM_LAYERS,) * plan.num_stages, self.now_s)
        for stage in range(len(self.stages)):
            self._network.pop(f"{self.name}/{stage}")
        self._build()
        self._incarnation += 1
        self._send(core.start_over(self._incarnation, self._num_pages, self._log_pages))

    def move_layers(self, layer_counts: tuple[int, ...]) -> None:
        """Layers move between the same number of stages, as in a move past its switch; nothing is
        in flight and transfers are held (`core.is_held`)."""
        assert self.core.is_held and not [*self.core.open_steps]
        slots = {layer: one for stage in self.stages for layer, one in stage._slots.items()}
        plan = StagePlan(self.core.plan.epoch + 1, layer_counts)
        if (log := self.core.scheduler.lost_pages.log) is not None:
            self.core.scheduler.lost_pages.forget_owed(self.now_s)
            log.move(self.core.plan, plan, self.core.scheduler.pages_in_use())
        self.core.plan = plan
        self.core.scheduler.epoch = plan.epoch
        self.core.step_forecast.know_plan(plan)
        for stage in self.stages:
            assert isinstance(stage, RoomStage) and not stage.inbox and not stage.offers
            layers = plan.layers_of(stage.stage)
            stage.layers = range(layers.start, layers.stop)
            stage._slots = {layer: slots[layer] for layer in stage.layers}

    def settle(self, request: Request) -> None:
        """The request's client has an answer."""
        assert request not in self.answered, "a request was answered twice"
        assert request.finish is not None
        self.answered.add(request)


@dataclass
class Stream:
    """One session: what is on its way to either end, each with the moment when it arrives."""

    decode: "DecodeServer"
    prefill: "PrefillServer"
    number: int
    to_prefill: deque[tuple[float, Any]] = field(default_factory=deque)
    to_decode: deque[tuple[float, Any]] = field(default_factory=deque)
    is_cut: bool = False


class PrefillServer(RoomServer):
    """Computes prompts."""

    rooms: PrefillRooms

    def begin(self, limits: RoomLimits, offload_ratio: float | None) -> None:
        self.rooms = PrefillRooms(self.core.scheduler, IDENTITY, limits, self.places)

    def check_end(self) -> None:
        held = self.tier.held
        assert held.num_rooms == held.num_pages == 0, "pages are still held"
        assert not held._withdrawn and not held._to_offer
        assert self.rooms.num_rooms == 0
        self.tier.lent.check_end()


class DecodeServer(RoomServer):
    """Draws tokens."""

    rooms: DecodeRooms

    def begin(self, limits: RoomLimits, offload_ratio: float | None) -> None:
        rule = OffloadRule(self.core.scheduler, offload_ratio) if limits.lends else None
        self.core.offload = rule
        self.rooms = DecodeRooms(self.core.scheduler, IDENTITY, limits, rule)

    def check_end(self) -> None:
        self.tier.arrivals.check_end()
        assert not self.rooms._rooms and not [*self.core.scheduler.offloaded]
        assert not self.core.scheduler.offloaded._lost
        assert self.tier.loads.loading_pages == 0, "pages are still promised"


def room_request(
    name: str, prompt: Sequence[int], max_new_tokens: int, room: Room, namespace: str = ""
) -> Request:
    request = make_request(name, prompt, max_new_tokens, namespace=namespace)
    request.room = room
    return request


class RoomWorld:
    """Servers, streams between them, and the time.

    Args:
        loss: the share of messages that streams lose, or carry twice.
        delays_s: how long a message takes.
        offload_ratio: that of decode servers, if `limits` say that pages are lent.
    """

    def __init__(
        self,
        limits: RoomLimits,
        random: Random | None = None,
        *,
        loss: float = 0.0,
        delays_s: Sequence[float] = (0.0,),
        offload_ratio: float | None = math.inf,
    ) -> None:
        self._delays_s, self._offload_ratio = delays_s, offload_ratio
        self.random, self.limits, self.loss = random or Random(0), limits, loss
        self.now_s = 0.0
        self.network: Network = {}
        self.servers: list[PrefillServer | DecodeServer] = []
        self.streams: list[Stream] = []
        self.cuts_noticed: list[Stream] = []
        self._next_session = 0
        self._next_room = 0
        self.unreachable: set[str] = set()
        self.num_faults = 0  # messages lost or repeated

    def add(
        self,
        kind: type[PrefillServer] | type[DecodeServer],
        name: str,
        layer_counts: tuple[int, ...] = (3, 3),
        num_pages: int = 32,
        log_pages: int | None = None,
        store: MemoryStore | None = None,
        draft_tokens: int = 0,
    ) -> Any:
        sizes = (layer_counts, num_pages, log_pages)
        server = kind(name, self.network, *sizes, self.now_s, store, draft_tokens)
        server.begin(self.limits, self._offload_ratio)
        self.servers.append(server)
        return server

    def prefills(self) -> list[PrefillServer]:
        return [one for one in self.servers if isinstance(one, PrefillServer)]

    def decodes(self) -> list[DecodeServer]:
        return [one for one in self.servers if isinstance(one, DecodeServer)]

    def new_room(self) -> int:
        self._next_room += 1
        return self._next_room

    # Requests

    def submit(self, server: RoomServer, request: Request) -> None:
        """What the scheduler's loop does with a request from the front."""
        request.arrival_s = self.now_s
        server.requests.append(request)
        rooms = server.rooms  # type: ignore[attr-defined]
        try:
            rooms.check(request)
            server.core.scheduler.add(request)
        except RequestError as error:
            request.finish = FinishReason(
                "abort", message=str(error), status_code=error.status_code
            )
            rooms.refused(request.room, str(error), error.status_code, self.now_s)
            server.settle(request)
        else:
            rooms.opened(request, self.now_s)

    def abort(self, server: RoomServer, request: Request) -> None:
        """Its client is gone."""
        finish = FinishReason("abort", message="the client is gone", status_code=499)
        if server.core.scheduler.abort(request.request_id, finish) is not None:
            server.settle(request)

    # Turns

    def turn(self, server: PrefillServer | DecodeServer) -> None:
        """A turn of a server's loop."""
        server.now_s = self.now_s
        self._serve(server)
        server.fill()
        if server.rooms.has_news:
            self._serve(server)
            server.fill()
        for request in server.requests:
            if request.finish is not None and request not in server.answered:
                server.settle(request)

    def _serve(self, server: PrefillServer | DecodeServer) -> None:
        for stream in [one for one in self.streams if server in (one.decode, one.prefill)]:
            self._deliver(stream, server)
        server.rooms.use_stages(server.places) if isinstance(server, PrefillServer) else None
        server.rooms.serve(self.now_s)
        if isinstance(server, DecodeServer):
            for address in server.rooms.peers_to_dial(self.now_s):
                self._dial(server, address)
        for session, message in server.rooms.outbox:
            self._send(server, session, message)
        server.rooms.outbox.clear()
        for session in server.rooms.closing:
            for stream in self.streams:
                if stream.number == session:
                    stream.is_cut = True
        server.rooms.closing.clear()
        for request in server.rooms.failed:
            server.settle(request)
        server.rooms.failed.clear()

    def _dial(self, decode: DecodeServer, address: str) -> None:
        found = [one for one in self.prefills() if one.name == address]
        if not found or address in self.unreachable:
            decode.rooms.dial_failed(address, "refused", self.now_s, is_final=False)
            return
        stream = Stream(decode, found[0], self._next_session)
        self._next_session += 1
        self.streams.append(stream)
        found[0].rooms.connected(stream.number, self.now_s)
        decode.rooms.connected(address, stream.number, self.now_s)

    def _send(self, server: RoomServer, session: int, message: Any) -> None:
        for stream in self.streams:
            if stream.number == session and not stream.is_cut:
                lane = stream.to_prefill if server is stream.decode else stream.to_decode
                due_s = max(self.now_s, lane[-1][0] if lane else 0.0)
                due_s += self.random.choice(self._delays_s)
                copies = 1
                if self.random.random() < self.loss:
                    copies = self.random.choice((0, 2))
                    self.num_faults += 1
                lane.extend([(due_s, message)] * copies)

    def _deliver(self, stream: Stream, server: RoomServer) -> None:
        """What has come to `server`; a cut is noticed behind it."""
        is_decode = server is stream.decode
        lane = stream.to_decode if is_decode else stream.to_prefill
        while lane and lane[0][0] <= self.now_s:
            _, message = lane.popleft()
            server.rooms.take(stream.number, message, self.now_s)  # type: ignore[attr-defined]
        if stream.is_cut and not lane:
            server.rooms.disconnected(stream.number, "cut", self.now_s)  # type: ignore[attr-defined]
            if stream in self.cuts_noticed:
                self.streams.remove(stream)
                self.cuts_noticed.remove(stream)
            else:
                self.cuts_noticed.append(stream)

    def run_stages(self, server: RoomServer, *, transfers: bool = True) -> None:
        """All that the stages have been told."""
        for stage in server.stages:
            while stage.inbox:
                server.run_order(stage.stage)
            while transfers and stage.transfers:
                server.end_transfer(stage.stage)

    def step(self, seconds: float = 0.05) -> None:
        """All that is due happens, in all servers."""
        self.now_s += seconds
        for server in self.servers:
            while server.lookups:
                server.answer()
            self.turn(server)
            self.run_stages(server)

    def run(self, turns: int = 2_000) -> None:
        """Until nothing is left to do; a client that waits for its prefill server goes on."""
        for _ in range(turns):
            self.step()
            if all(self._is_idle(server) for server in self.servers):
                return
        raise AssertionError("a request never ended, or a room")

    def _is_idle(self, server: PrefillServer | DecodeServer) -> bool:
        has_rooms = server.rooms.num_rooms > 0
        lanes = [
            *(one.to_decode for one in self.streams),
            *(one.to_prefill for one in self.streams),
        ]
        return server.core.scheduler.is_idle and not has_rooms and not any(lanes)

    def check(self) -> None:
        """Asserts that all requests have ended, rightly or by name, and that nothing is kept."""
        self.step()
        for server in self.servers:
            for request in server.requests:
                assert request in server.answered, f"{request.request_id} was not answered"
                assert request.finish is not None
                right = right_output(request.prompt_ids, len(request.output_ids))
                assert request.output_ids == right
                if request.finish.kind == "abort":
                    assert request.finish.message and request.finish.status_code
                    assert "does not give the pages" not in request.finish.message
                else:
                    assert len(request.output_ids) == request.stops.max_new_tokens
            server.check_end()
            if not self.num_faults and isinstance(server, PrefillServer):
                assert not server.rooms._halves.wanted, "rooms without a request"
            server.tier.use(None, RULES)  # pages may be on their way to a store
            pages = server.core.scheduler._pages
            assert pages.storage.locked_pages == 0, "pages are still locked"
            assert pages.num_free + pages.storage.evictable_pages == pages.num_pages
