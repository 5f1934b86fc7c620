"""Servers of prefill and of decode in virtual time: pipelines with the rooms of real servers.

The rooms (`sgl_pipeline/disaggregation/`) are driven as by `managers/disaggregation/room_ends.py`:
once a turn, and again when the scheduler has news for them. They are the place beyond the pool of
each pipeline. No server is ever silent, so pings are not carried, and no room waits in vain.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from sgl_pipeline.disaggregation.decode_rooms import DecodeRooms
from sgl_pipeline.disaggregation.identity import ServerIdentity
from sgl_pipeline.disaggregation.prefill_rooms import PrefillRooms
from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.disaggregation.room_messages import Ping, Ready
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.page_transfers import PageOrder, PagePlace
from sgl_pipeline.simulator.peer_pages import PeerReads, VirtualOffers
from sgl_pipeline.simulator.pipeline_costs import PipelineTiming
from sgl_pipeline.simulator.remote_attention import RemoteAttention
from sgl_pipeline.simulator.simulation import ServedRequest
from sgl_pipeline.simulator.virtual_offload import VirtualOffload
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import (
    EndLoad,
    LoadPages,
    OfferPages,
    PeerStage,
    UseStore,
    WithdrawPages,
)

FOR_EVER = float("inf")
LIMITS = RoomLimits(bootstrap_timeout_s=FOR_EVER, waiting_timeout_s=FOR_EVER, silence_s=FOR_EVER)
Rooms = TypeVar("Rooms", PrefillRooms, DecodeRooms)


class RoomServer(PagePlace, Generic[Rooms]):
    """A server, as the `PagePlace` of its pipeline. Whoever joins it to others sets `send`, which
    carries a message of a session to its other end, and `on_end`, which hears of each request that
    has ended, was refused or has failed."""

    look_s = 1.0  # for a scheduler that has let its transfers rest (`kv_tier.py`)
    send: Callable[[int, Any, float], None]
    on_end: Callable[[Request, ServedRequest, float], None]

    def __init__(
        self,
        name: str,
        rooms: Rooms,
        scheduler: StepScheduler,
        costs: PipelineTiming,
        forecast: StepForecast | None,
        remote: RemoteAttention | None = None,
    ) -> None:
        self.name = name
        self.rooms: Rooms = rooms
        self._tier = scheduler.tier
        self.pipeline = VirtualPipeline(scheduler, costs, forecast, store=self, remote=remote)
        self.pipeline.clients.on_begin = self._begun
        self.pipeline.clients.on_end = self._ended

    def hear(self, session: int, message: Any, now_s: float) -> None:
        """A message of another server has come."""
        self.rooms.take(session, message, now_s)
        self.pipeline.turn(now_s)

    @property
    def is_awaited(self) -> bool:
        return self._has_news

    def next_event_s(self) -> float:
        return float("-inf") if self._has_news else FOR_EVER

    def exchange(self, core: PipelineCore, now_s: float) -> None:
        rooms = self.rooms
        rooms.serve(now_s)
        assert not rooms.closing, "a session fails, though none is ever lost"
        for session, message in rooms.outbox:
            if not isinstance(message, Ping):
                self.send(session, message, now_s)
        rooms.outbox.clear()
        for request in rooms.failed:
            self.pipeline.clients.fail(request, now_s)
        rooms.failed.clear()

    @property
    def _has_news(self) -> bool:
        """True if the scheduler has something for `exchange`."""
        tier = self._tier
        return bool(tier.ended_rooms or tier.arrivals.ended or tier.held.offered)

    def _begun(self, request: Request, served: ServedRequest) -> None:
        self.rooms.opened(request, request.arrival_s)

    def _ended(self, request: Request, served: ServedRequest, now_s: float) -> None:
        if request.finish is None:
            assert request.room is not None
            self.rooms.refused(request.room, served.error, 400, now_s)
        self.on_end(request, served, now_s)


class PrefillServer(RoomServer[PrefillRooms]):
    """`waiting_tokens` are those of prompts that are not computed, `most_held_pages` the most that
    were held for decode servers at a time."""

    def __init__(
        self,
        name: str,
        scheduler: StepScheduler,
        costs: PipelineTiming,
        forecast: StepForecast | None = None,
    ) -> None:
        plan = StagePlan(0, costs.layer_counts)
        layers = map(plan.layers_of, range(plan.num_stages))
        stages = tuple(PeerStage("", (own.start, own.stop)) for own in layers)
        rooms = PrefillRooms(scheduler, _identity(name, scheduler, plan), LIMITS, stages)
        super().__init__(name, rooms, scheduler, costs, forecast)
        self.offers = VirtualOffers()
        self.waiting_tokens = 0
        self.most_held_pages = 0

    @property
    def is_open(self) -> bool:
        """True if pages wait to be read, which may take long."""
        return self._tier.held.num_rooms > 0

    def exchange(self, core: PipelineCore, now_s: float) -> None:
        super().exchange(core, now_s)
        self.most_held_pages = max(self.most_held_pages, self._tier.held.num_pages)

    def take(self, order: PageOrder, plan: StagePlan, taken_s: Sequence[float]) -> None:
        assert isinstance(order, OfferPages | WithdrawPages), "a prefill server has no store"
        self.offers.take(order, plan, taken_s)

    def ran(self, stage: int, start_s: float, end_s: float) -> None:
        return  # its stages report steps alone


class DecodeServer(RoomServer[DecodeRooms]):
    """`num_requests` are all that were given to it and have not ended. `dial` reaches a prefill
    server by its name.

    Args:
        reserved_tokens: as `RoomLimits` has them.
        offload: None: no request is offloaded.
    """

    dial: Callable[[str, float], None]

    def __init__(
        self,
        name: str,
        scheduler: StepScheduler,
        costs: PipelineTiming,
        reads: PeerReads,
        forecast: StepForecast | None = None,
        offload: VirtualOffload | None = None,
        reserved_tokens: int = LIMITS.reserved_tokens,
    ) -> None:
        plan = StagePlan(0, costs.layer_counts)
        limits = replace(LIMITS, reserved_tokens=reserved_tokens)
        rooms = DecodeRooms(scheduler, _identity(name, scheduler, plan), limits)
        remote = None if offload is None else offload.remote
        super().__init__(name, rooms, scheduler, costs, forecast, remote)
        self.reads = reads
        self.offload = offload
        self.num_requests = 0
        self._requests: dict[int, Request] = {}  # by their rooms

    @property
    def is_awaited(self) -> bool:
        return self._has_news or self.reads.is_under_way

    @property
    def is_open(self) -> bool:
        """True unless there are prompts that could be loaded and are not."""
        return self.is_awaited or self._tier.arrivals.num_found == 0

    def next_event_s(self) -> float:
        return min(super().next_event_s(), self.reads.next_report_s())

    def hear(self, session: int, message: Any, now_s: float) -> None:
        if self.offload is not None and isinstance(message, Ready):
            self.offload.decide(self._requests[message.room])
        super().hear(session, message, now_s)

    def exchange(self, core: PipelineCore, now_s: float) -> None:
        if self.offload is not None:
            self.offload.set_aside()
        for report in self.reads.take_reports(now_s):
            core.take_store_report(report)
        for name in self.rooms.peers_to_dial(now_s):
            self.dial(name, now_s)
        super().exchange(core, now_s)

    def take(self, order: PageOrder, plan: StagePlan, taken_s: Sequence[float]) -> None:
        if isinstance(order, UseStore):
            self.reads.forget()
            return
        if isinstance(order, EndLoad):
            return  # no load hangs, and its pages have been withdrawn
        assert isinstance(order, LoadPages), "a decode server has no store"
        request = self._requests[order.offer]
        crosses = self.offload is None or request not in self.offload.remote.requests
        self.reads.load(order, plan, taken_s, crosses=crosses)

    def ran(self, stage: int, start_s: float, end_s: float) -> None:
        self.reads.ran(stage, start_s, end_s)

    def _begun(self, request: Request, served: ServedRequest) -> None:
        assert request.room is not None
        self._requests[request.room.number] = request
        super()._begun(request, served)

    def _ended(self, request: Request, served: ServedRequest, now_s: float) -> None:
        assert request.room is not None
        self._requests.pop(request.room.number, None)
        if self.offload is not None:
            self.offload.ended(request)
        super()._ended(request, served, now_s)


def _identity(name: str, scheduler: StepScheduler, plan: StagePlan) -> ServerIdentity:
    """All servers of a run are of one model."""
    return ServerIdentity(
        name=name,
        digest="",
        page_size=scheduler.args.page_size,
        num_layers=plan.num_layers,
        kv_dtype="",
    )
