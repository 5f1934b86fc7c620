"""One virtual server's end of the streams to others: what `managers/disaggregation/room_ends.py`
does, with what has arrived in a list."""

from collections.abc import Callable, Collection, Mapping
from random import Random

from fault_schedules.fake_front import FakeFront
from fault_schedules.lease_checks import check_leases, check_leases_end
from fault_schedules.room_streams import RoomStreams
from fault_schedules.transfer_checks import check_transfers
from fault_schedules.virtual_time import EventLoop

from sgl_pipeline.disaggregation.decode_rooms import DecodeRooms
from sgl_pipeline.disaggregation.prefill_rooms import PrefillRooms
from sgl_pipeline.disaggregation.room_messages import Ready
from sgl_pipeline.managers.disaggregation.offering_stages import OfferingStages
from sgl_pipeline.requests import Request, RequestState
from sgl_pipeline.scheduling import StepScheduler

# The loop looks at the clock at least so often; the real one does ten times a second.
POLL_S = 1.3


class RoomDriver:
    """The rooms of the server `name`, and what joins them to its streams.

    Args:
        stages: gives the places of its stages, where it computes prompts.
        turn: lets the scheduler go on.
        turn_soon: as `turn`, perhaps a while later.
        needs_clock: says whether anybody waits for anything.
        whole_pages: the numbers of whole pages of the prompts of each room.
        forgets: the clock goes on until what ended rooms leave behind is too old.
    """

    def __init__(
        self,
        name: str,
        scheduler: StepScheduler,
        rooms: PrefillRooms | DecodeRooms,
        stages: OfferingStages | None,
        streams: RoomStreams,
        front: FakeFront,
        loop: EventLoop,
        rng: Random,
        *,
        turn: Callable[[], None],
        turn_soon: Callable[[], None],
        needs_clock: Callable[[], bool],
        whole_pages: Mapping[int, Collection[int]],
        forgets: bool,
    ) -> None:
        self.name, self.rooms = name, rooms
        self._scheduler, self._tier, self._stages = scheduler, scheduler.tier, stages
        self._streams, self._front = streams, front
        self._loop, self._rng = loop, rng
        self._turn, self._turn_soon, self._needs_clock = turn, turn_soon, needs_clock
        self._forgets, self._whole_pages = forgets, whole_pages
        self._inbox: list[Callable[[], None]] = []
        self.is_closed = False
        self._poll_later()

    # Requests

    def check(self, request: Request) -> None:
        self.rooms.check(request)

    def opened(self, request: Request) -> None:
        self.rooms.opened(request, self._loop.now_s)

    def refused(self, request: Request, reason: str, status: int) -> None:
        assert request.room is not None
        self.rooms.refused(request.room, reason, status, self._loop.now_s)

    # Streams

    def arrive(self, call: Callable[[float], None], *, wakes: bool = True) -> None:
        """Something has come of a stream, which `call` tells the rooms in the next turn, with the
        time; that is soon if it `wakes` the loop."""
        if not self.is_closed:
            self._inbox.append(lambda: call(self._loop.now_s))
            if wakes:
                self._turn_soon()

    def serve(self) -> None:
        """Takes and sends what there is, and ends the requests that have ended with their rooms."""
        rooms, now_s = self.rooms, self._loop.now_s
        inbox, self._inbox = self._inbox, []
        for call in inbox:
            call()
        rooms.serve(now_s)
        if isinstance(rooms, DecodeRooms):
            for address in rooms.peers_to_dial(now_s):
                self._streams.dial(self, address)
        elif self._stages is not None:
            rooms.use_stages(self._stages())
        for session, message in rooms.outbox:
            if isinstance(message, Ready):
                is_whole = message.num_pages in self._whole_pages[message.room]
                assert is_whole, "pages are ready that are not there"
            self._streams.send(self, session, message)
        for session in rooms.closing:
            self._streams.close(self, session)
        rooms.outbox.clear()
        rooms.closing.clear()
        failed = rooms.failed[:]
        rooms.failed.clear()
        for request in failed:
            assert request.finish is not None
            self._front.end(request, request.finish)

    @property
    def has_news(self) -> bool:
        """True if the scheduler has something for `serve`, which nothing else will wake."""
        return self.rooms.has_news

    def close(self) -> None:
        """The server has died."""
        self.is_closed = True
        self._streams.end_of(self)

    def _poll(self) -> None:
        if self.is_closed or not self._needs_clock():
            return
        if self._scheduler.is_idle and not self.rooms.num_rooms:
            self.serve()  # a turn would do no more
        else:
            self._turn()
        self._poll_later()

    def _poll_later(self) -> None:
        self._loop.after(self._rng.random() * POLL_S, self._poll)

    # What must hold

    def check_now(self) -> None:
        """Asserts that pages are kept from others as long as peers may write or read them, and that
        no request is counted as expected that is not."""
        check_transfers(self._scheduler)
        check_leases(self._scheduler, self.rooms)
        arrivals = self._tier.arrivals
        assert arrivals.promised_output_tokens == sum(arrivals._promised.values())
        for request in (*arrivals._held, *arrivals._promised):
            assert request.state is RequestState.WAITING, "a request that does not wait is expected"
        if isinstance(self.rooms, PrefillRooms):
            for room in self.rooms._rooms.values():
                is_wanted = room.session in self.rooms._sessions._sessions or room.is_unneeded
                assert room.session is None or is_wanted, "a room of a session that is over"
        for load in self._tier.loads._loads.values():
            is_promised = load.request in arrivals._promised or not arrivals.holds(load.request)
            assert is_promised, "the tokens of a request that loads are not reserved"

    def check_end(self) -> None:
        """Asserts that nothing is held, promised or remembered, long after the last request."""
        rooms, tier = self.rooms, self._tier
        held = tier.held
        assert rooms.num_rooms == 0, "a room never ended"
        assert held.num_rooms == held.num_pages == 0, "pages are still held"
        assert not held._withdrawn and not held._to_offer, "an offer was never withdrawn"
        assert not held.offered and not held.lost
        check_leases_end(self._scheduler, rooms)
        tier.arrivals.check_end()
        assert tier.loads.promised_pages == 0, "pages are still promised"
        if isinstance(rooms, PrefillRooms):
            halves = rooms._halves
            assert not halves.wanted, "a room is wanted for ever"
            is_empty = not halves._failures and not halves._unneeded
            assert is_empty or not self._forgets, "a room is remembered for ever"
        else:
            ends = [end for peer in rooms._servers._peers.values() for end in peer.ends]
            assert not ends or not self._forgets, "an end is kept for ever"
