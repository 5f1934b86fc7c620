"""The rooms of a decode server: requests whose prompts other servers compute.

A request is held in the queue, its prefill server is asked for its room, and once that one is ready
the scheduler loads the pages as those of a store. Then the request is an ordinary one with a radix
hit. Whatever keeps a prompt from coming ends its room: the request ends with a named error, or, by
rule, is computed here.

The driver opens and closes streams, each a session with a number of its own, and calls `serve`
once a turn. It sends `outbox`, closes `closing`, and answers the requests `failed`; it empties all
three. What arrives of a session that is over has no effect.
"""

from collections import deque
from dataclasses import dataclass, field

from sgl_pipeline.disaggregation.heartbeat import Heartbeat
from sgl_pipeline.disaggregation.identity import ServerIdentity
from sgl_pipeline.disaggregation.room_counts import RoomCounts
from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.disaggregation.room_messages import (
    End,
    FromDecode,
    FromPrefill,
    Got,
    PeerRejected,
    PeerStages,
    PeerWelcome,
    Ping,
    Ready,
    Want,
)
from sgl_pipeline.errors import RequestError
from sgl_pipeline.requests import FinishReason, Request, Room
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.wire.store_orders import PeerPlace, PeerStage

# Prefill servers at a time: their addresses come with requests.
MOST_PEERS = 64
REDIAL_S = 1.0
# Where no request waits for it; also the most ends that are kept for it meanwhile.
LONGEST_REDIAL_S = 30.0
MOST_ENDS = 1_000
# How long a prefill server may be out of reach, or not have pages that it said it has (its layers
# move, a stage is being replaced), before its rooms fail.
UNREACHABLE_S = 3.0
MISSING_S = 30.0
# How long a load may go on whose request has ended: then it hangs.
ORPHAN_S = 5.0
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 1.0
_TICK_S = 0.1


@dataclass(slots=True, eq=False)
class _Room:
    """`ready_s` is when the prefill server was ready. Pages are asked for again at `retry_s`, if
    some did not come; none has come since `missing_s`."""

    request: Request
    peer: str
    opened_s: float
    ready_s: float | None = None
    num_pages: int = 0
    retry_s: float | None = None
    rest_s: float = FIRST_RETRY_S
    missing_s: float | None = None
    loaded_before: int = 0

    @property
    def number(self) -> int:
        assert self.request.room is not None
        return self.request.room.number


@dataclass(slots=True, eq=False)
class _Peer:
    """A prefill server: not dialed, being dialed, greeted, or known (`stages`). `ends` are of
    rooms that have failed here, each with its moment; it may not have heard of them."""

    session: int | None = None
    heartbeat: Heartbeat | None = None
    stages: tuple[PeerStage, ...] | None = None
    epoch: int = -1
    is_dialing: bool = False
    redial_s: float = float("-inf")
    rest_s: float = REDIAL_S
    failing_since_s: float | None = None
    ends: deque[tuple[float, End | Got]] = field(default_factory=lambda: deque(maxlen=MOST_ENDS))


class DecodeRooms:
    """All rooms of one `scheduler`, which is that of a decode server from now on."""

    def __init__(
        self, scheduler: StepScheduler, identity: ServerIdentity, limits: RoomLimits
    ) -> None:
        self._scheduler, self._tier = scheduler, scheduler.tier
        self._arrivals = scheduler.tier.arrivals
        self._identity, self._limits = identity, limits
        self._rooms: dict[int, _Room] = {}
        self._peers: dict[str, _Peer] = {}
        self._peer_of: dict[int, str] = {}  # by session
        self._next_tick_s = float("-inf")
        self._orphans_since_s: float | None = None
        self.outbox: list[tuple[int, FromDecode]] = []
        self.closing: list[int] = []
        self.failed: list[Request] = []
        self.counts = RoomCounts()
        self._tier.read_peers(limits.reserved_tokens)

    # Requests

    def check(self, request: Request) -> None:
        """Raises RequestError for a request with a room that cannot be opened."""
        room = request.room
        assert room is not None
        if room.number in self._rooms:
            raise RequestError(f"bootstrap_room {room.number} belongs to another request")
        if room.peer not in self._peers and len(self._peers) >= MOST_PEERS:
            raise RequestError(
                f"{MOST_PEERS} prefill servers are in use already, {room.peer} would be one more",
                503,
            )

    def opened(self, request: Request, now_s: float) -> None:
        """The scheduler has queued a request that `check` has accepted."""
        assert request.room is not None
        room = _Room(request, request.room.peer, now_s)
        self._rooms[room.number] = room
        peer = self._peers.setdefault(room.peer, _Peer())
        if peer.stages is not None:
            self._send(peer, Want(room.number))
        peer.redial_s = min(peer.redial_s, now_s + REDIAL_S)

    def refused(self, room: Room, reason: str, status: int, now_s: float) -> None:
        """A request of `room` was refused here: its other half ends, too."""
        if room.number in self._rooms:
            return  # the room of another request
        if room.peer in self._peers or len(self._peers) < MOST_PEERS:
            peer = self._peers.setdefault(room.peer, _Peer())
            self._send_end(peer, End(room.number, reason, status), now_s)

    # Streams

    def peers_to_dial(self, now_s: float) -> list[str]:
        """The addresses to dial now: each is followed by `connected` or `dial_failed`."""
        due = [
            address
            for address, peer in self._peers.items()
            if peer.session is None and not peer.is_dialing and now_s >= peer.redial_s
        ]
        if due:
            needed = {room.peer for room in self._rooms.values()}
            due = [one for one in due if one in needed or self._peers[one].ends]
        for address in due:
            self._peers[address].is_dialing = True
        return due

    def connected(self, address: str, session: int, now_s: float) -> None:
        """The prefill server at `address` has been reached."""
        peer = self._peers[address]
        peer.is_dialing = False
        peer.session, peer.heartbeat = session, Heartbeat(now_s, self._limits.silence_s)
        self._peer_of[session] = address
        self._send(peer, self._identity.hello())

    def dial_failed(self, address: str, reason: str, now_s: float, *, is_final: bool) -> None:
        """The prefill server at `address` was not reached; nor will it be, if that `is_final`."""
        self._take_ended(now_s)
        self._peers[address].is_dialing = False
        self._not_reached(address, reason, now_s, is_final=is_final)

    def disconnected(self, session: int, reason: str, now_s: float) -> None:
        """A stream has ended."""
        self._take_ended(now_s)
        address = self._peer_of.get(session)
        if address is None:
            return
        if self._peers[address].stages is None:
            self._forget_session(address)
            self._not_reached(address, f"{address}: {reason}", now_s, is_final=False)
        else:
            self._lose_peer(address, f"{address} is gone: {reason}", 503, now_s)

    def take(self, session: int, message: FromPrefill, now_s: float) -> None:
        """A message of a prefill server."""
        self._take_ended(now_s)
        address = self._peer_of.get(session)
        if address is None:
            return
        peer = self._peers[address]
        assert peer.heartbeat is not None
        peer.heartbeat.heard(now_s)
        if isinstance(message, PeerWelcome | PeerStages):
            self._meet(address, peer, message, now_s)
        elif isinstance(message, PeerRejected):
            self._give_up(address, message.reason, 500, now_s)
            peer.ends.clear()
        elif isinstance(message, Ready | End):
            room = self._rooms.get(message.room)
            if room is None or room.peer != address:
                return  # it has ended here
            if isinstance(message, End):
                self._fail(room, message.reason, message.status, now_s, tells=False)
            elif room.ready_s is None:
                self._be_ready(room, message, now_s)

    def serve(self, now_s: float) -> None:
        """Goes on with what has happened in the scheduler, and with what time brings."""
        self._take_ended(now_s)
        self._take_loads(now_s)
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + _TICK_S
        for room in [*self._rooms.values()]:
            self._tick(room, now_s)
        self._take_loads(now_s)
        self._cut_off_orphans(now_s)
        for address, peer in [*self._peers.items()]:
            if peer.heartbeat is not None and peer.session is not None:
                if peer.heartbeat.is_dead(now_s):
                    self._give_up(address, f"{address} is silent", 503, now_s)
                elif peer.heartbeat.is_due(now_s):
                    self._send(peer, Ping())
            while peer.ends and now_s - peer.ends[0][0] > self._limits.bootstrap_timeout_s:
                peer.ends.popleft()  # it has waited long enough for the room
        self._forget_unused_peers()

    # Queries

    @property
    def num_rooms(self) -> int:
        """Requests whose prompts have not come yet."""
        return len(self._rooms)

    @property
    def num_peers(self) -> int:
        """Prefill servers that are connected."""
        return sum(peer.stages is not None for peer in self._peers.values())

    # Inside

    def _meet(
        self, address: str, peer: _Peer, message: PeerWelcome | PeerStages, now_s: float
    ) -> None:
        is_new = peer.stages is None
        if is_new != isinstance(message, PeerWelcome) or message.epoch <= peer.epoch:
            return  # an earlier one, late
        if not _has_all_layers(message.stages, self._identity.num_layers):
            layers = [stage.layers for stage in message.stages]
            reason = f"its stages have layers {layers} of {self._identity.num_layers}"
            self._give_up(address, reason, 500, now_s)
            return
        peer.epoch, peer.stages = message.epoch, message.stages
        peer.failing_since_s, peer.rest_s = None, REDIAL_S
        self._use_peers()
        if is_new:
            for _, end in peer.ends:
                self._send(peer, end)
            for room in self._rooms.values():
                if self._peers[room.peer] is peer:
                    self._send(peer, Want(room.number))

    def _use_peers(self) -> None:
        digest = self._identity.digest
        self._tier.use_peers(
            tuple(
                PeerPlace(name=address, digest=digest, stages=peer.stages)
                for address, peer in self._peers.items()
                if peer.stages is not None
            )
        )

    def _lose_peer(self, address: str, reason: str, status: int, now_s: float) -> None:
        """Ends all rooms of a prefill server, and the session with it, if there is one."""
        was_known = self._peers[address].stages is not None
        self._forget_session(address)
        for room in [one for one in self._rooms.values() if one.peer == address]:
            self._fail(room, f"the prefill server failed: {reason}", status, now_s)
        if was_known:
            self._use_peers()

    def _give_up(self, address: str, reason: str, status: int, now_s: float) -> None:
        """As `_lose_peer`, for a session that this end closes."""
        session = self._peers[address].session
        assert session is not None
        self.closing.append(session)
        self._lose_peer(address, reason, status, now_s)

    def _not_reached(self, address: str, reason: str, now_s: float, *, is_final: bool) -> None:
        """There is no session, and another attempt will be made a while later if one is needed."""
        peer = self._peers[address]
        if peer.failing_since_s is None:
            peer.failing_since_s = now_s
        if is_final or now_s - peer.failing_since_s >= UNREACHABLE_S:
            self._lose_peer(address, reason, 503, now_s)
            peer.rest_s = min(2 * peer.rest_s, LONGEST_REDIAL_S)
        if is_final:
            peer.ends.clear()
        peer.redial_s = now_s + peer.rest_s

    def _forget_session(self, address: str) -> None:
        peer = self._peers[address]
        if peer.session is not None:
            del self._peer_of[peer.session]
        peer.session = peer.heartbeat = peer.stages = None
        peer.epoch = -1

    def _be_ready(self, room: _Room, message: Ready, now_s: float) -> None:
        room.ready_s, room.num_pages = now_s, message.num_pages
        room.request.peer_cached_tokens = message.cached_tokens
        self._arrivals.found(room.request, room.peer, message.num_pages)

    def _take_ended(self, now_s: float) -> None:
        """Requests that have ended, here or by their clients, need nothing any more."""
        ended = self._tier.ended_rooms[:]
        self._tier.ended_rooms.clear()
        for request in ended:
            assert request.room is not None and request.finish is not None
            room = self._rooms.get(request.room.number)
            if room is None or room.request is not request:
                continue
            del self._rooms[room.number]
            self.counts.note_failure(is_transfer=room.ready_s is not None)
            reason = request.finish.message or "the request has ended"
            self._tell_end(room, reason, request.finish.status_code or 500, now_s)

    def _take_loads(self, now_s: float) -> None:
        ended = self._arrivals.ended[:]
        self._arrivals.ended.clear()
        for request in ended:
            assert request.room is not None
            room = self._rooms.get(request.room.number)
            if room is None or room.request is not request:
                continue
            if self._arrivals.has_all(request):
                del self._rooms[room.number]
                self.counts.note_transfer(now_s - (room.ready_s or now_s))
                self._arrivals.let_go(request)
                self._send(self._peers[room.peer], Got(room.number))
            else:
                self._retry_later(room, now_s)

    def _retry_later(self, room: _Room, now_s: float) -> None:
        loaded = self._arrivals.pages_here(room.request)
        if loaded > room.loaded_before or room.missing_s is None:
            room.loaded_before, room.missing_s, room.rest_s = loaded, now_s, FIRST_RETRY_S
        room.retry_s = now_s + room.rest_s
        room.rest_s = min(2 * room.rest_s, LONGEST_RETRY_S)

    def _tick(self, room: _Room, now_s: float) -> None:
        limits = self._limits
        if room.ready_s is None:
            if now_s - room.opened_s > limits.bootstrap_timeout_s:
                waited = f"{limits.bootstrap_timeout_s:g} s"
                self._fail(
                    room, f"the prefill server {room.peer} was not ready {waited}", 503, now_s
                )
        elif now_s - room.ready_s > limits.waiting_timeout_s:
            self._fail(
                room,
                f"the pages of the prompt have not come from {room.peer} for "
                f"{limits.waiting_timeout_s:g} s",
                503,
                now_s,
            )
        elif room.missing_s is not None and now_s - room.missing_s > MISSING_S:
            message = self._arrivals.counts.last_message
            reason = f"{room.peer} does not give the pages of the prompt: {message}"
            self._fail(room, reason, 503, now_s)
        elif room.retry_s is not None and now_s >= room.retry_s:
            room.retry_s = None
            self._arrivals.found(room.request, room.peer, room.num_pages)

    def _cut_off_orphans(self, now_s: float) -> None:
        """Loads whose rooms have ended fall short soon, because their pages are withdrawn; one that
        hangs must not keep pages for ever."""
        if not self._tier.loads.has_orphans:
            self._orphans_since_s = None
        elif self._orphans_since_s is None:
            self._orphans_since_s = now_s
        elif now_s - self._orphans_since_s > ORPHAN_S:
            self._orphans_since_s = None
            self._tier.interrupt()

    def _fail(
        self, room: _Room, reason: str, status: int, now_s: float, *, tells: bool = True
    ) -> None:
        """Ends a room before its prompt has come: with its request, unless that is computed here.

        Args:
            tells: the prefill server is to hear of it.
        """
        del self._rooms[room.number]
        self.counts.note_failure(is_transfer=room.ready_s is not None)
        if self._limits.falls_back and status >= 500:
            room.request.peer_cached_tokens = None
            self._arrivals.let_go(room.request)
            self.counts.num_computed_here += 1
            if tells:
                self._send_end(self._peers[room.peer], Got(room.number), now_s)
            return
        if tells:
            self._tell_end(room, reason, status, now_s)
        finish = FinishReason("abort", message=reason, status_code=status)
        self._scheduler.abort(room.request.request_id, finish)
        self.failed.append(room.request)

    def _tell_end(self, room: _Room, reason: str, status: int, now_s: float) -> None:
        end = End(room.number, reason, status)
        self._send_end(self._peers[room.peer], end, now_s)

    def _send_end(self, peer: _Peer, end: End | Got, now_s: float) -> None:
        """Now, and again in the next session: what was sent last in one may not have arrived."""
        peer.ends.append((now_s, end))
        if peer.stages is not None:
            self._send(peer, end)

    def _send(self, peer: _Peer, message: FromDecode) -> None:
        if peer.session is not None:
            self.outbox.append((peer.session, message))

    def _forget_unused_peers(self) -> None:
        """Forgets the peers that nothing is left to say to."""
        needed = {room.peer for room in self._rooms.values()}
        for address, peer in [*self._peers.items()]:
            is_open = peer.session is not None or peer.is_dialing
            if not is_open and address not in needed and not peer.ends:
                del self._peers[address]


def _has_all_layers(stages: tuple[PeerStage, ...], num_layers: int) -> bool:
    """True if each layer of the model is on one of the stages."""
    layers = [layer for stage in stages for layer in range(*stage.layers)]
    return layers == list(range(num_layers))
