"""The rooms of a prefill server: requests whose tokens other servers draw.

A request computes its prompt and draws one token, which answers its own client. Its pages are held
(`scheduling/held_pages.py`) until the decode server that wants the room has read them. Either half
of a room may come first. Whatever ends a room early is reported to the other server, which ends the
other half; the number of a room that has failed is remembered for halves that come late.

The driver opens and closes streams, each a session with a number of its own, and calls `serve`
once a turn. It sends `outbox`, closes `closing`, and answers the requests `failed`; it empties all
three. What arrives of a session that is over has no effect.
"""

from dataclasses import dataclass

from sgl_pipeline.disaggregation.decode_sessions import DecodeSessions
from sgl_pipeline.disaggregation.half_rooms import MOST_REMEMBERED, HalfRooms
from sgl_pipeline.disaggregation.identity import ServerIdentity
from sgl_pipeline.disaggregation.lent_rooms import UNUSED_S, LentRooms
from sgl_pipeline.disaggregation.room_counts import RoomCounts
from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.disaggregation.room_messages import (
    Borrow,
    End,
    FromDecode,
    FromPrefill,
    Got,
    Ready,
    Want,
)
from sgl_pipeline.errors import RequestError
from sgl_pipeline.requests import FinishReason, Request, RequestState, Room
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.wire.store_orders import PeerStage

# How long pages are kept that no decode server has asked for, where other requests need the room.
# It asks as soon as its half has come, and its grammar, or after a dial of a few seconds.
UNWANTED_S = 5.0
_TICK_S = 0.1


@dataclass(slots=True, eq=False)
class _Room:
    """`session` wants it, unless it `is_unneeded`: then its pages are not held. They are since
    `held_s`, and the decode server knows since `ready_s` that it can read them."""

    request: Request
    session: int | None
    is_unneeded: bool = False
    is_offered: bool = False
    held_s: float | None = None
    ready_s: float | None = None


class PrefillRooms:
    """All rooms of one `scheduler`, which is that of a prefill server from now on.

    Args:
        stages: those that offer pages now.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        identity: ServerIdentity,
        limits: RoomLimits,
        stages: tuple[PeerStage, ...],
    ) -> None:
        self._scheduler, self._tier = scheduler, scheduler.tier
        self._held = scheduler.tier.held
        self._limits = limits
        self._rooms: dict[int, _Room] = {}
        self._halves = HalfRooms(limits.bootstrap_timeout_s)
        self._next_tick_s = float("-inf")
        self.outbox: list[tuple[int, FromPrefill]] = []
        self.closing: list[int] = []
        self.failed: list[Request] = []
        self.counts = RoomCounts()
        self._sessions = DecodeSessions(
            identity, limits.silence_s, stages, self._tier.lent, self.outbox
        )
        self.leases = LentRooms(self._tier.lent, self.outbox)
        self._tier.compute_for_peers(identity.digest, limits.held_share)
        if limits.lends:
            self._tier.lent.begin(identity.digest)

    # Requests

    def check(self, request: Request) -> None:
        """Raises RequestError for a request with a room that is in use, or has failed already."""
        assert request.room is not None
        number = request.room.number
        if (failure := self._halves.failure(number)) is not None:
            raise RequestError(failure.reason, failure.status)
        if number in self._rooms:
            raise RequestError(f"bootstrap_room {number} belongs to another request")

    def opened(self, request: Request, now_s: float) -> None:
        """The scheduler has queued a request that `check` has accepted."""
        assert request.room is not None
        number, halves = request.room.number, self._halves
        room = _Room(request, halves.take_wanted(number), halves.take_unneeded(number))
        self._rooms[number] = room

    def refused(self, room: Room, reason: str, status: int, now_s: float) -> None:
        """A request of `room` was refused here: its other half ends, too."""
        if room.number not in self._rooms and self._halves.failure(room.number) is None:
            session = self._halves.take_wanted(room.number)
            self._note_failure(room.number, session, reason, status, now_s)

    # Streams

    def use_stages(self, stages: tuple[PeerStage, ...]) -> None:
        """Pages are offered by `stages` from now on."""
        self._sessions.use_stages(stages)

    def connected(self, session: int, now_s: float) -> None:
        """A decode server has dialed."""
        self._sessions.connected(session, now_s)

    def disconnected(self, session: int, reason: str, now_s: float) -> None:
        """A stream has ended."""
        self._take_ended(now_s)
        if self._sessions.disconnected(session):
            self._lose(session, reason, now_s)

    def take(self, session: int, message: FromDecode, now_s: float) -> None:
        """A message of a decode server."""
        self._take_ended(now_s)
        self._take_offers(now_s)  # what is lost is not ready
        if not self._sessions.hear(session, message, now_s):
            return
        if isinstance(message, Want):
            self._want(session, message.room, now_s)
        elif isinstance(message, Borrow):
            self._borrow(session, message, now_s)
        elif isinstance(message, Got):
            self._got(session, message.room, now_s)
        elif isinstance(message, End):
            self._end(session, message, now_s)

    def serve(self, now_s: float) -> None:
        """Goes on with what has happened in the scheduler, and with what time brings."""
        self._take_ended(now_s)
        self.leases.serve()
        self._take_offers(now_s)
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + _TICK_S
        self._end_late(now_s)
        self._make_room(now_s)
        for session in self._sessions.end_silent(now_s):
            self.closing.append(session)
            self._lose(session, "it is silent", now_s)

    # Queries

    @property
    def has_news(self) -> bool:
        """True if the scheduler has something for `serve`."""
        held, lent = self._held, self._tier.lent
        return bool(self._tier.ended_rooms or held.offered or held.lost or lent.lent or lent.over)

    @property
    def num_rooms(self) -> int:
        """Rooms that have not ended."""
        return len(self._rooms)

    @property
    def num_peers(self) -> int:
        """Decode servers that are connected."""
        return self._sessions.num_known

    @property
    def num_unwanted(self) -> int:
        """Requests that no decode server has asked for."""
        return sum(room.session is None for room in self._rooms.values())

    # Inside

    def _want(self, session: int, number: int, now_s: float) -> None:
        if (failure := self._halves.failure(number)) is not None:
            self.outbox.append((session, failure))
        elif (room := self._rooms.get(number)) is not None:
            if room.session is None:
                room.session = session
                self._be_ready(number, room, now_s)
        elif self._halves.is_full:
            reason = f"{MOST_REMEMBERED} rooms are waited for already; try again later"
            self.outbox.append((session, End(number, reason, 503)))
        else:
            self._halves.want(number, session, now_s)

    def _borrow(self, session: int, message: Borrow, now_s: float) -> None:
        room = self._rooms.get(message.room)
        if room is not None and room.session == session and room.ready_s is not None:
            self.leases.borrow(session, message, now_s)

    def _got(self, session: int, number: int, now_s: float) -> None:
        room = self._rooms.get(number)
        if room is None:
            self._halves.need_not(number, now_s)
        elif room.session in (None, session):
            room.is_unneeded = True
            if room.held_s is not None:
                self._let_go(number, room, now_s)

    def _let_go(self, number: int, room: _Room, now_s: float) -> None:
        """Ends a room whose pages no server will read any more."""
        del self._rooms[number]
        self.leases.end(number)
        self._held.let_go(number)
        if room.ready_s is not None:
            self.counts.note_transfer(now_s - room.ready_s)

    def _end(self, session: int, end: End, now_s: float) -> None:
        """The decode server has no use for a room, whose request may be anywhere."""
        room = self._rooms.get(end.room)
        if room is not None and room.session in (None, session):
            self._fail(end.room, end.reason, end.status, now_s, is_notified=False)
        elif room is None and self._halves.failure(end.room) is None:
            self._halves.take_wanted(end.room)
            self._halves.fail(end, now_s)

    def _lose(self, session: int, reason: str, now_s: float) -> None:
        """A decode server is dead, or out of reach: it reads nothing any more."""
        gone = f"the decode server is gone: {reason}"
        wanted = [one for one, room in self._rooms.items() if room.session == session]
        for number in wanted:
            if not self._rooms[number].is_unneeded:
                self._fail(number, gone, 503, now_s, is_notified=False)
        for number in self._halves.wanted_by(session):
            self._halves.take_wanted(number)
            self._halves.fail(End(number, gone, 503), now_s)

    def _take_ended(self, now_s: float) -> None:
        """Requests that have computed their prompts are held; others are failures."""
        ended = self._tier.ended_rooms[:]
        self._tier.ended_rooms.clear()
        for request in ended:
            assert request.room is not None and request.finish is not None
            room = self._rooms.get(request.room.number)
            if room is None or room.request is not request:
                continue
            if request.finish.kind == "abort":
                reason = request.finish.message or "the request has ended"
                self._fail(request.room.number, reason, request.finish.status_code or 500, now_s)
            else:
                room.held_s = now_s
                if room.is_unneeded:
                    self._let_go(request.room.number, room, now_s)

    def _take_offers(self, now_s: float) -> None:
        offered, lost = self._held.offered[:], self._held.lost[:]
        self._held.offered.clear()
        self._held.lost.clear()
        for number in lost:
            if number in self._rooms:
                reason = "a stage of the prefill server was lost with the prompt's pages"
                self._fail(number, reason, 503, now_s)
        for number in offered:
            if (room := self._rooms.get(number)) is not None:
                room.is_offered = True
                self._be_ready(number, room, now_s)

    def _be_ready(self, number: int, room: _Room, now_s: float) -> None:
        """Says once that the pages can be read, if they can and someone wants them."""
        if room.is_offered and room.session is not None and room.ready_s is None:
            room.ready_s = now_s
            num_pages, num_cached = self._held.pages_of(number), room.request.cached_tokens
            ready = Ready(room=number, num_pages=num_pages, cached_tokens=num_cached)
            self.outbox.append((room.session, ready))

    def _end_late(self, now_s: float) -> None:
        patience_s = self._limits.bootstrap_timeout_s
        for number, room in [*self._rooms.items()]:
            if self.leases.is_lent(number):
                if self.leases.is_late(number, now_s):
                    reason = f"the decode server has not named the lease for {UNUSED_S:g} s"
                    self._fail(number, reason, 503, now_s)
            elif room.ready_s is not None:
                if now_s - room.ready_s > self._limits.waiting_timeout_s:
                    waited = f"for {self._limits.waiting_timeout_s:g} s"
                    reason = f"the decode server has not read the pages {waited}"
                    self._fail(number, reason, 503, now_s)
            elif room.held_s is not None and now_s - room.held_s > patience_s:
                waited = f"for {patience_s:g} s"
                self._fail(number, f"no decode server has asked for the room {waited}", 503, now_s)
        for number, session in self._halves.forget_old(now_s):
            reason = f"the prefill server has got no request of the room for {patience_s:g} s"
            self._note_failure(number, session, reason, 503, now_s)

    def _make_room(self, now_s: float) -> None:
        """Ends held rooms that no decode server has asked for, the earliest first, while they keep
        requests from being admitted. Their pages stay cached until they are evicted."""
        scheduler, held = self._scheduler, self._held
        is_blocked = held.is_full or self._tier.is_starved
        if not is_blocked or not scheduler.num_waiting or scheduler.pausing.is_paused:
            return
        unwanted = [
            (room.held_s, number)
            for number, room in self._rooms.items()
            if room.session is None and room.held_s is not None
        ]
        for held_s, number in sorted(unwanted):
            if now_s - held_s < UNWANTED_S:
                return
            waited = f"no decode server had asked for the room for {UNWANTED_S:g} s"
            self._fail(number, f"other requests needed the pages, and {waited}", 503, now_s)
            if not held.is_full:
                return  # whether the first request fits now is known after the next step

    def _fail(
        self, number: int, reason: str, status: int, now_s: float, *, is_notified: bool = True
    ) -> None:
        """Ends a room before its pages were read, and its request, if that still computes.

        Args:
            is_notified: the decode server gets a message of it.
        """
        room = self._rooms.pop(number)
        self.counts.note_failure(is_transfer=room.ready_s is not None)
        self.leases.end(number)
        self._held.let_go(number)
        # After its end another request may have its id.
        if room.request.state is not RequestState.FINISHED:
            finish = FinishReason("abort", message=reason, status_code=status)
            self._scheduler.abort(room.request.request_id, finish)
            self.failed.append(room.request)
        self._note_failure(number, room.session if is_notified else None, reason, status, now_s)

    def _note_failure(
        self, number: int, session: int | None, reason: str, status: int, now_s: float
    ) -> None:
        """Remembers the end of a room, and sends it to the session that wants it."""
        end = End(number, reason, status)
        self._halves.fail(end, now_s)
        if session is not None:
            self.outbox.append((session, end))
