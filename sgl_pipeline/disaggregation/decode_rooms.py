"""The rooms of a decode server: requests whose prompts other servers compute.

A request is held in the queue, its prefill server is asked for its room, and once that one is ready
the scheduler loads the pages as those of a store. Then the request is an ordinary one with a radix
hit. Whatever keeps a prompt from coming ends its room: the request ends with a named error, or, by
rule, is computed here.

The driver opens and closes streams, each a session with a number of its own, and calls `serve`
once a turn. It sends `outbox`, closes `closing`, and answers the requests `failed`; it empties all
three. What arrives of a session that is over has no effect.
"""

from dataclasses import dataclass

from sgl_pipeline.disaggregation.identity import ServerIdentity
from sgl_pipeline.disaggregation.offloaded_rooms import ANSWER_S, OffloadedRooms
from sgl_pipeline.disaggregation.prefill_servers import MOST_PEERS, PrefillServers
from sgl_pipeline.disaggregation.room_counts import RoomCounts
from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.disaggregation.room_messages import (
    AboutRoom,
    End,
    FromDecode,
    FromPrefill,
    Got,
    LeaseOver,
    Lent,
    NotLent,
    Ready,
    Want,
)
from sgl_pipeline.errors import RequestError
from sgl_pipeline.pipeline.offload_rule import OffloadRule
from sgl_pipeline.requests import FinishReason, Request, Room
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.wire.store_orders import PeerPlace

# How long a prefill server may lack pages that it said it has (its layers move, a stage is being
# replaced), before the room fails; and when it is asked again.
MISSING_S = 30.0
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 1.0
_TICK_S = 0.1


@dataclass(slots=True, eq=False)
class _Room:
    """`ready_s` is when the prefill server was ready. Pages are asked for again at `retry_s`, if
    some did not come; none has come since `missing_s`. As `BorrowingRoom`; while its request has a
    lease nothing is waited for."""

    request: Request
    peer: str
    opened_s: float
    ready_s: float | None = None
    num_pages: int = 0
    retry_s: float | None = None
    rest_s: float = FIRST_RETRY_S
    missing_s: float | None = None
    loaded_before: int = 0
    asked_s: float | None = None

    @property
    def number(self) -> int:
        assert self.request.room is not None
        return self.request.room.number


class DecodeRooms:
    """All rooms of one `scheduler`, which is that of a decode server from now on.

    Args:
        rule: says which prompts stay where they were computed; None: none.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        identity: ServerIdentity,
        limits: RoomLimits,
        rule: OffloadRule | None = None,
    ) -> None:
        self._scheduler, self._tier = scheduler, scheduler.tier
        self._arrivals = scheduler.tier.arrivals
        self._limits = limits
        self._servers = PrefillServers(identity, limits, self)
        self.offloading = OffloadedRooms(scheduler, self._servers, rule)
        self._rooms: dict[int, _Room] = {}
        self._next_tick_s = float("-inf")
        self.failed: list[Request] = []
        self.counts = RoomCounts()
        self._tier.read_peers(limits.reserved_tokens)

    @property
    def outbox(self) -> list[tuple[int, FromDecode]]:
        """Messages to send, each with its session."""
        return self._servers.outbox

    @property
    def closing(self) -> list[int]:
        """Sessions to close."""
        return self._servers.closing

    # Requests

    def check(self, request: Request) -> None:
        """Raises RequestError for a request with a room that cannot be opened."""
        room = request.room
        assert room is not None
        if room.number in self._rooms:
            raise RequestError(f"bootstrap_room {room.number} belongs to another request")
        if not self._servers.can_know(room.peer):
            raise RequestError(
                f"{MOST_PEERS} prefill servers are in use already, {room.peer} would be one more",
                503,
            )

    def opened(self, request: Request, now_s: float) -> None:
        """The scheduler has queued a request that `check` has accepted."""
        assert request.room is not None
        room = _Room(request, request.room.peer, now_s)
        self._rooms[room.number] = room
        self._servers.know(room.peer, now_s)
        self._servers.send(room.peer, Want(room.number))

    def refused(self, room: Room, reason: str, status: int, now_s: float) -> None:
        """A request of `room` was refused here: its other half ends, too."""
        # Unless the room is another request's.
        if room.number not in self._rooms and self._servers.can_know(room.peer):
            self._servers.know(room.peer, now_s)
            self._servers.send_end(room.peer, End(room.number, reason, status), now_s)

    # Streams

    def peers_to_dial(self, now_s: float) -> list[str]:
        """The addresses to dial now: each is followed by `connected` or `dial_failed`."""
        return self._servers.to_dial(now_s, self._needed_peers)

    def connected(self, address: str, session: int, now_s: float) -> None:
        """The prefill server at `address` has been reached."""
        self._servers.connected(address, session, now_s)

    def dial_failed(self, address: str, reason: str, now_s: float, *, is_final: bool) -> None:
        """The prefill server at `address` was not reached; nor will it be, if that `is_final`."""
        self._take_ended(now_s)
        self._servers.dial_failed(address, reason, now_s, is_final=is_final)

    def disconnected(self, session: int, reason: str, now_s: float) -> None:
        """A stream has ended."""
        self._take_ended(now_s)
        self._servers.disconnected(session, reason, now_s)

    def take(self, session: int, message: FromPrefill, now_s: float) -> None:
        """A message of a prefill server."""
        self._take_ended(now_s)
        about_room = self._servers.take(session, message, now_s)
        if about_room is None:
            return
        address, news = about_room
        room = self._rooms.get(news.room)
        if room is None or room.peer != address:
            return  # it has ended here
        self._hear(room, news, now_s)

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
        self.offloading.tick(now_s)
        self._take_ended(now_s)
        self._servers.tick(now_s, self._needed_peers())

    # Queries

    @property
    def has_news(self) -> bool:
        """True if the scheduler has something for `serve`."""
        return bool(
            self._tier.ended_rooms or self._arrivals.ended or self._scheduler.offloaded.has_ended
        )

    @property
    def num_rooms(self) -> int:
        """Requests whose prompts have not come yet."""
        return sum(room.request.lease is None for room in self._rooms.values())

    @property
    def num_peers(self) -> int:
        """Prefill servers that are connected."""
        return self._servers.num_met

    # What `PrefillServers` reports

    def on_met(self, address: str) -> None:
        """A prefill server can be asked for its rooms."""
        for room in self._rooms.values():
            if room.peer == address:
                self._servers.send(address, Want(room.number))

    def on_lost(self, address: str, reason: str, status: int, now_s: float) -> None:
        """Nothing comes from a prefill server any more."""
        for room in [one for one in self._rooms.values() if one.peer == address]:
            self._fail(room, f"the prefill server failed: {reason}", status, now_s)

    def on_places(self, places: tuple[PeerPlace, ...]) -> None:
        """The stages of prefill servers are these."""
        self._tier.use_peers(places)

    # Inside

    def _needed_peers(self) -> set[str]:
        return {room.peer for room in self._rooms.values()}

    def _hear(self, room: _Room, news: AboutRoom, now_s: float) -> None:
        if isinstance(news, End):
            self._fail(room, news.reason, news.status, now_s, is_notified=False)
        elif isinstance(news, Ready):
            if room.ready_s is None:
                self._be_ready(room, news, now_s)
        elif isinstance(news, LeaseOver):
            if room.request.lease is not None and not self.offloading.end(room):
                room.ready_s = now_s
                self._read(room)
        elif room.asked_s is None or room.request.lease is not None:
            return  # it was not waited for any more
        elif isinstance(news, Lent):
            self.offloading.begin(room)
        elif isinstance(news, NotLent):
            self.offloading.refused(room, news.reason)
            self._read(room)

    def _be_ready(self, room: _Room, message: Ready, now_s: float) -> None:
        room.ready_s, room.num_pages = now_s, message.num_pages
        room.request.peer_cached_tokens = message.cached_tokens
        if not self.offloading.ask(room, self._rooms.values(), now_s):
            self._read(room)

    def _read(self, room: _Room) -> None:
        """The room's pages are loaded."""
        self._arrivals.found(room.request, room.peer, room.num_pages)

    def _take_leases(self, now_s: float) -> None:
        """Requests that have lost their lease while they ran compute all here."""
        for request, lease in self.offloading.take_ended():
            room = self._rooms.get(lease.number)
            if room is not None and room.request is request:
                del self._rooms[room.number]
                self._servers.send_end(room.peer, Got(room.number), now_s)

    def _take_ended(self, now_s: float) -> None:
        """Requests that have ended, here or by their clients, need nothing any more; nor do those
        that have lost their lease."""
        self._take_leases(now_s)
        ended = self._tier.ended_rooms[:]
        self._tier.ended_rooms.clear()
        for request in ended:
            assert request.room is not None and request.finish is not None
            room = self._rooms.get(request.room.number)
            if room is None or room.request is not request:
                continue
            del self._rooms[room.number]
            if request.lease is not None:
                self._servers.send_end(room.peer, Got(room.number), now_s)
                continue
            self.counts.note_failure(is_transfer=room.ready_s is not None)
            reason = request.finish.message or "the request has ended"
            end = End(room.number, reason, request.finish.status_code or 500)
            self._servers.send_end(room.peer, end, now_s)

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
                self._note_transfer(room, now_s)
                self._arrivals.let_go(request)
                self._servers.send(room.peer, Got(room.number))
            else:
                self._retry_later(room, now_s)

    def _note_transfer(self, room: _Room, now_s: float) -> None:
        ready_s = now_s if room.ready_s is None else room.ready_s
        first_load_s = self._arrivals.first_load_s(room.request)
        if first_load_s is None:
            first_load_s = now_s  # there was nothing to load
        bootstrap_s, alloc_s = ready_s - room.opened_s, first_load_s - ready_s
        self.counts.note_transfer(now_s - ready_s, bootstrap_s, alloc_s)

    def _retry_later(self, room: _Room, now_s: float) -> None:
        loaded = self._arrivals.pages_here(room.request)
        if loaded > room.loaded_before or room.missing_s is None:
            room.loaded_before, room.missing_s, room.rest_s = loaded, now_s, FIRST_RETRY_S
        # Not after the first try, which may have waited for room since then.
        elif now_s - room.missing_s > MISSING_S and room.rest_s == LONGEST_RETRY_S:
            message = self._arrivals.counts.last_message
            reason = f"{room.peer} does not give the pages of the prompt: {message}"
            self._fail(room, reason, 503, now_s)
            return
        room.retry_s = now_s + room.rest_s
        room.rest_s = min(2 * room.rest_s, LONGEST_RETRY_S)

    def _tick(self, room: _Room, now_s: float) -> None:
        limits = self._limits
        if room.request.lease is not None:
            self.offloading.keep(room, now_s)
        elif room.asked_s is not None and now_s - room.asked_s > ANSWER_S:
            self.offloading.refused(room, f"it has not answered for {ANSWER_S:g} s")
            self._read(room)
        elif room.ready_s is None:
            if now_s - room.opened_s > limits.bootstrap_timeout_s:
                waited = f"for {limits.bootstrap_timeout_s:g} s"
                reason = f"the prefill server {room.peer} was not ready {waited}"
                self._fail(room, reason, 503, now_s)
        elif now_s - room.ready_s > limits.waiting_timeout_s:
            waited = f"for {limits.waiting_timeout_s:g} s"
            progress = self._arrivals.progress(room.request)
            self._fail(room, f"the prompt has not come {waited}: {progress}", 503, now_s)
        elif room.retry_s is not None and now_s >= room.retry_s:
            room.retry_s = None
            self._arrivals.found(room.request, room.peer, room.num_pages)

    def _fail(
        self, room: _Room, reason: str, status: int, now_s: float, *, is_notified: bool = True
    ) -> None:
        """Ends a room before its prompt has come: with its request, unless that is computed here.

        Args:
            is_notified: the prefill server gets a message of it.
        """
        self._take_leases(now_s)
        if self._rooms.get(room.number) is not room:
            return  # it ran, and has lost its lease already
        if room.request.lease is not None and self.offloading.end(room):
            return  # it runs: `_take_leases`
        del self._rooms[room.number]
        self.counts.note_failure(is_transfer=room.ready_s is not None)
        if self._limits.falls_back and status >= 500:
            room.request.peer_cached_tokens = None
            self._arrivals.let_go(room.request)
            self.counts.num_computed_here += 1
            if is_notified:
                self._servers.send_end(room.peer, Got(room.number), now_s)
            return
        if is_notified:
            self._servers.send_end(room.peer, End(room.number, reason, status), now_s)
        finish = FinishReason("abort", message=reason, status_code=status)
        self._scheduler.abort(room.request.request_id, finish)
        self.failed.append(room.request)
