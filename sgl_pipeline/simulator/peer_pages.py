"""The pages of prefill servers as a decode pipeline reads them, in virtual time.

A room is one request's way from its prefill to its decode. From the moment at which its prefill has
ended until the decode side has what it lacks, the prefill server holds its whole pages; a load
brings those of one room over the link, which occupies both of its ends. Loads run beside the steps
of the stages and take nothing from them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from sgl_pipeline.page_hash import split_hashes
from sgl_pipeline.page_record import PageRecord
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.page_wishes import Lookup
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.simulator.page_transfers import TransferQueue, reports_of
from sgl_pipeline.simulator.workload import SimulatedRequest
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import LoadPages, PagesLoaded, StoreOrder, UseStore


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """The network between two servers: `latency_s` each way, `bytes_per_s` at each end."""

    latency_s: float
    bytes_per_s: float


@dataclass(slots=True)
class LinkEnd:
    """One server's end of the link, which carries one transfer at a time."""

    free_s: float = 0.0


@dataclass(slots=True, eq=False)
class Room:
    """`hashes` are those of the pages that the prefill server holds. Of an offloaded room no page
    crosses: its keys and values stay where they are."""

    asked: SimulatedRequest
    arrival_s: float
    source: LinkEnd
    hashes: Sequence[bytes] = ()
    is_offloaded: bool = False


def peer_rules(page_size: int) -> TierRules:
    """The rules of a decode server: whatever its prefill has computed is loaded, nothing saved."""
    return TierRules(
        least_tokens=page_size,
        wait_policy="wait_complete",
        look_ahead=1 << 30,
        write_policy="write_back",
        save_share=0.0,
    )


@dataclass(slots=True)
class PeerPages:
    """The pages of all open rooms, for a decode pipeline's tier to read. `on_close` hears of each
    room whose request lacks nothing any more; `on_exchange` is called before anything is loaded."""

    link: PeerLink
    layer_page_bytes: int
    on_close: Callable[[Room, float], None] = lambda room, now_s: None
    on_exchange: Callable[[], None] = lambda: None
    end: LinkEnd = field(default_factory=LinkEnd)
    loaded_bytes: int = 0
    _rooms: dict[bytes, list[Room]] = field(default_factory=dict)
    _begun: dict[Room, Request] = field(default_factory=dict)
    _loads: dict[int, TransferQueue] = field(default_factory=dict)

    def open(self, room: Room) -> None:
        """The prefill of `room` has ended."""
        for page_hash in room.hashes:
            self._rooms.setdefault(page_hash, []).append(room)

    def begin(self, room: Room, request: Request) -> None:
        """The scheduler has taken the request of `room`."""
        self._begun[room] = request

    def close(self, room: Room, now_s: float) -> None:
        """The decode side needs nothing of `room` any more."""
        for page_hash in room.hashes:
            rooms = self._rooms[page_hash]
            rooms.remove(room)
            if not rooms:
                del self._rooms[page_hash]
        self.on_close(room, now_s)

    @property
    def is_awaited(self) -> bool:
        return any(queue.transfers for queue in self._loads.values())

    @property
    def is_open(self) -> bool:
        return self.is_awaited

    def next_event_s(self) -> float:
        done_s = (queue.transfers[0].done_s for queue in self._loads.values() if queue.transfers)
        return min(done_s, default=float("inf"))

    def exchange(self, core: PipelineCore, now_s: float) -> None:
        self.on_exchange()
        tier = core.scheduler.tier
        queues = self._loads.values()
        for report in reports_of([one for queue in queues for one in queue.take_due(now_s)]):
            core.take_store_report(report)
        tier.broken.clear()
        while lookups := tier.take_lookups():
            for lookup in lookups:
                tier.found(lookup.number, list(self._look_up(lookup)))
        for room, request in list(self._begun.items()):
            if not tier.awaits(request):
                del self._begun[room]
                self.close(room, now_s)

    def take(self, order: StoreOrder, plan: StagePlan, taken_s: Sequence[float]) -> None:
        if isinstance(order, UseStore):
            self._loads.clear()
            return
        assert isinstance(order, LoadPages), "a decode server saves nothing"
        hashes = split_hashes(order.hashes)
        # Of another request's room, which may have been closed since the lookup.
        readable = list(takewhile(self._rooms.__contains__, hashes))
        room = self._rooms[readable[-1]][0] if readable else None
        for stage, moment_s in enumerate(taken_s):
            num_bytes = len(readable) * len(plan.layers_of(stage)) * self.layer_page_bytes
            done_s = moment_s
            if room is None or room.is_offloaded:
                num_bytes = 0
            else:
                done_s = self._send(room.source, num_bytes, moment_s)
            report = PagesLoaded(
                stage=stage,
                transfer=order.transfer,
                num_pages=len(readable),
                num_bytes=num_bytes,
                busy_s=done_s - moment_s,
                is_broken=len(readable) < len(hashes),
                message="" if len(readable) == len(hashes) else "let go",
            )
            queue = self._loads.setdefault(stage, TransferQueue())
            queue.add_until(report, max(done_s, queue.free_s))

    def ran(self, stage: int, start_s: float, end_s: float) -> None:
        if stage in self._loads:
            self._loads[stage].put_off(start_s, end_s)

    def _send(self, source: LinkEnd, num_bytes: int, asked_s: float) -> float:
        """The moment at which a stage has what it asks for at `asked_s`."""
        begun_s = max(asked_s + self.link.latency_s, source.free_s, self.end.free_s)
        source.free_s = self.end.free_s = begun_s + num_bytes / self.link.bytes_per_s
        self.loaded_bytes += num_bytes
        return self.end.free_s + self.link.latency_s

    def _look_up(self, lookup: Lookup) -> Iterator[PageRecord]:
        """The records of the pages up to the first that no open room has."""
        for page_hash in takewhile(self._rooms.__contains__, lookup.hashes):
            yield PageRecord(page_hash, (), b"")
