"""Prefill and decode on pipelines of their own, in virtual time.

A request goes to a prefill server, which computes its prompt and one token, and holds its whole
pages until the decode server has read them. The decode server finds them as a hit, computes the
rest of the prompt, a page of tokens at most, and decodes. With an offload rule, some requests leave
their pages where they are, and their attention is computed there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.page_hashing import prefix_hashes
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.simulator.fleet import VirtualFleet, least
from sgl_pipeline.simulator.peer_pages import LinkEnd, PeerPages, Room
from sgl_pipeline.simulator.remote_attention import RemoteAttention
from sgl_pipeline.simulator.simulation import ServedRequest
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import Segment, SimulatedRequest
from sgl_pipeline.throttle.attention_offload import AttentionWork, Reading, should_offload


@dataclass(frozen=True, slots=True)
class OffloadRule:
    """The offload bound, and the reading of the paper's rule. With `only_hidden` a request is
    declined whose attention elsewhere would make layers wait."""

    bound: float
    reading: Reading = "either"
    only_hidden: bool = True


@dataclass(slots=True)
class PrefillServer:
    """`waiting_tokens` are those of prompts that are not computed, `most_held_pages` the most that
    were held for decode servers at a time."""

    pipeline: VirtualPipeline
    link_end: LinkEnd = field(default_factory=LinkEnd)
    waiting_tokens: int = 0
    most_held_pages: int = 0


@dataclass(slots=True)
class DecodeServer:
    """`rooms` are all that were given to it and have not ended. `remote` computes the attention of
    offloaded requests; None: none is offloaded. The last `lent_pages` of its scheduler's pool are
    on prefill servers: all others must fit in the rest."""

    pipeline: VirtualPipeline
    pages: PeerPages
    remote: RemoteAttention | None = None
    lent_pages: int = 0
    rooms: dict[int, "PlacedRoom"] = field(default_factory=dict)
    num_offloaded: int = 0

    def set_aside(self) -> None:
        """Keeps from all others the lent pages that offloaded requests do not fill."""
        scheduler = self.pipeline.scheduler
        page_size = scheduler.args.page_size
        filled = sum(
            -(-room.num_tokens // page_size) for room in self.rooms.values() if room.is_offloaded
        )
        scheduler.kept_pages.set_aside(max(0, self.lent_pages - filled))


@dataclass(slots=True, eq=False, kw_only=True)
class PlacedRoom(Room):
    """A room between its two servers. `held` ends the prefix that the prefill server holds."""

    prefill: PrefillServer
    decode: DecodeServer
    held: RadixNode | None = None
    is_ready: bool = False  # the decode server has heard of it
    request: Request | None = None  # on the decode server
    prefilled_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values it needs."""
        return self.asked.input_tokens if self.request is None else self.request.num_tokens


class DisaggregatedFleet(VirtualFleet):
    """Prefill servers, decode servers, and a router that picks one of each: the least tokens to
    prefill, the least rooms.

    `prefill_s` is what each request took to the end of its prefill, `handover_s` from there to its
    first token for the client.
    """

    def __init__(
        self,
        prefills: Sequence[PrefillServer],
        decodes: Sequence[DecodeServer],
        rule: OffloadRule | None = None,
    ) -> None:
        pipelines = [one.pipeline for one in prefills] + [one.pipeline for one in decodes]
        super().__init__(pipelines)
        self.prefills, self.decodes, self._rule = tuple(prefills), tuple(decodes), rule
        self.prefill_s: list[float] = []
        self.handover_s: list[float] = []
        # Rooms whose prompt is being computed, by the request that the prefill server has.
        self._prefilling: dict[int, PlacedRoom] = {}
        for prefill in prefills:
            prefill.pipeline.clients.on_end = self._prefilled
        for decode in decodes:
            decode.pipeline.clients.on_begin = partial(self._begun, decode)
            decode.pipeline.clients.on_end = partial(self._decoded, decode)
            decode.pages.on_exchange = decode.set_aside
            decode.pages.on_close = self._got

    def route(self, asked: SimulatedRequest, now_s: float) -> None:
        """As `VirtualFleet`."""
        prefill = self.prefills[least([one.waiting_tokens for one in self.prefills])]
        decode = self.decodes[least([len(one.rooms) for one in self.decodes])]
        room = PlacedRoom(asked, now_s, prefill.link_end, prefill=prefill, decode=decode)
        prefill.waiting_tokens += asked.input_tokens
        decode.rooms[id(asked)] = room
        one_token = replace(asked, output=Segment(asked.output.first, 1), follow_up=None)
        self._prefilling[id(one_token)] = room
        prefill.pipeline.clients.expect(one_token, now_s)

    # Prefill servers

    def _prefilled(self, request: Request, served: ServedRequest, now_s: float) -> None:
        """A prompt is computed, or was refused."""
        room = self._prefilling.pop(id(served.asked))
        prefill = room.prefill
        prefill.waiting_tokens -= room.asked.input_tokens
        if served.error:
            del room.decode.rooms[id(room.asked)]
            self.end(ServedRequest(room.asked, room.arrival_s, error=served.error), now_s)
            return
        scheduler = prefill.pipeline.scheduler
        room.held = scheduler.kept_pages.hold(request.prompt_ids, request.cache_namespace)
        room.hashes = prefix_hashes(room.held, scheduler.args.page_size)
        room.prefilled_s = now_s
        held_pages = scheduler.kept_pages.num_pages
        prefill.most_held_pages = max(prefill.most_held_pages, held_pages)
        self.at(now_s + room.decode.pages.link.latency_s, partial(self._ready, room))

    def _let_go(self, room: PlacedRoom, now_s: float) -> None:
        """The prefill server hears that the pages are not needed any more."""
        assert room.held is not None
        pipeline = room.prefill.pipeline
        pipeline.scheduler.kept_pages.let_go(room.held)
        if not pipeline.is_idle:
            pipeline.turn(now_s)

    # Decode servers

    def _ready(self, room: PlacedRoom, now_s: float) -> None:
        """The decode server hears that a prompt is computed."""
        room.is_offloaded = self._should_offload(room)
        room.is_ready = True
        room.decode.num_offloaded += room.is_offloaded
        room.decode.pages.open(room)
        room.decode.pipeline.clients.expect(room.asked, now_s, room.arrival_s)

    def _should_offload(self, room: PlacedRoom) -> bool:
        decode, asked, rule = room.decode, room.asked, self._rule
        if rule is None:
            return False
        assert decode.remote is not None
        here, elsewhere = AttentionWork(), AttentionWork()
        for other in decode.rooms.values():
            if not other.is_ready:
                continue
            work = AttentionWork(1, other.num_tokens)
            if other.is_offloaded:
                elsewhere += work
            else:
                here += work
        most_tokens = asked.input_tokens + asked.output_tokens
        if not should_offload(elsewhere, here, most_tokens, rule.bound, rule.reading):
            return False
        with_it = elsewhere + AttentionWork(1, asked.input_tokens)
        return not rule.only_hidden or decode.remote.hides(with_it, here)

    def _begun(self, decode: DecodeServer, request: Request, served: ServedRequest) -> None:
        room = decode.rooms[id(served.asked)]
        room.request = request
        decode.pages.begin(room, request)
        if room.is_offloaded:
            assert decode.remote is not None
            decode.remote.requests.add(request)

    def _got(self, room: Room, now_s: float) -> None:
        """A decode server has the pages of `room`."""
        assert isinstance(room, PlacedRoom)
        self.at(now_s + room.decode.pages.link.latency_s, partial(self._let_go, room))

    def _decoded(
        self, decode: DecodeServer, request: Request, served: ServedRequest, now_s: float
    ) -> None:
        """A request has ended on its decode server, or was refused there."""
        room = decode.rooms.pop(id(served.asked))
        if served.error:
            decode.pages.close(room, now_s)
        else:
            self.prefill_s.append(room.prefilled_s - room.arrival_s)
            self.handover_s.append(served.token_times_s[0] - room.prefilled_s)
        if decode.remote is not None:
            decode.remote.requests.discard(request)
        self.end(served, now_s)
