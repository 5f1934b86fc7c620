"""A server's end of the streams to its peers: carries messages between them and its rooms.

The scheduler's loop calls `serve` once a turn, and the descriptors of either end wake it.
"""

import random
from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import zmq

from sgl_pipeline.cluster.doors import ROOMS_DOOR, DialError, Door
from sgl_pipeline.disaggregation.decode_rooms import DecodeRooms
from sgl_pipeline.disaggregation.prefill_rooms import PrefillRooms
from sgl_pipeline.disaggregation.room_messages import FromDecode, FromPrefill
from sgl_pipeline.disaggregation.rooms_state import decode_state, prefill_state
from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.disaggregation.dialer import Dialer
from sgl_pipeline.managers.disaggregation.peer_streams import PeerStreams
from sgl_pipeline.pipeline.pipeline_state import RoomsState
from sgl_pipeline.requests import Request, Room
from sgl_pipeline.scheduling.kv_tier import KvTier
from sgl_pipeline.wire.store_orders import PeerStage

Rooms = TypeVar("Rooms", PrefillRooms, DecodeRooms)


class StagesNow(Protocol):
    """Whoever knows where the stages offer pages."""

    def __call__(self) -> tuple[PeerStage, ...]:
        """All stages, in order; cheap, since it is asked once a turn."""


class RoomsEnd(ABC, Generic[Rooms]):
    """Either end. Requests without a room are none of its business; of the others a share fails on
    purpose, by `failure_probability`."""

    def __init__(
        self, rooms: Rooms, tier: KvTier, streams: PeerStreams[Any], failure_probability: float
    ) -> None:
        self._rooms: Rooms = rooms
        self._tier, self._streams = tier, streams
        self._failure_probability = failure_probability

    def check(self, request: Request) -> None:
        """Raises RequestError for a request whose room cannot be opened."""
        if request.room is None:
            return
        self._rooms.check(request)
        if random.random() < self._failure_probability:
            raise RequestError("this room was made to fail (SGLANG_TEST_DISAGG_FAILURE_PROB)", 500)

    def opened(self, request: Request, now_s: float) -> None:
        """The scheduler has queued a request that `check` has accepted."""
        if request.room is not None:
            self._rooms.opened(request, now_s)

    def refused(self, room: Room | None, reason: str, status: int, now_s: float) -> None:
        """A request of `room` was refused before it was queued: its other half ends, too."""
        if room is not None:
            self._rooms.refused(room, reason, status, now_s)

    def serve(self, now_s: float) -> list[Request]:
        """Takes and sends what there is; returns the requests that have ended with their rooms."""
        rooms, streams = self._rooms, self._streams
        self._take_connections(now_s)
        for session, message in streams.receive():
            rooms.take(session, message, now_s)
        for session, reason in streams.take_broken().items():
            rooms.disconnected(session, reason, now_s)
        rooms.serve(now_s)
        self._connect(now_s)
        for session, answer in rooms.outbox:
            streams.send(session, answer)
        for session in rooms.closing:
            streams.end(session)
        failed = rooms.failed[:]
        rooms.outbox.clear()
        rooms.closing.clear()
        rooms.failed.clear()
        return failed

    @property
    def has_news(self) -> bool:
        """True if the scheduler has something for `serve`, which nothing else will wake."""
        return self._rooms.has_news

    @abstractmethod
    def state(self) -> RoomsState:
        """The state now."""

    def close(self) -> None:
        """Ends all streams."""
        self._streams.close()

    @abstractmethod
    def _take_connections(self, now_s: float) -> None:
        """Tells the rooms of connections that have come about, or have not."""

    def _connect(self, now_s: float) -> None:
        """Begins what the rooms need."""


class PrefillEnd(RoomsEnd[PrefillRooms]):
    """A prefill server's end: decode servers come to its door."""

    def __init__(
        self,
        rooms: PrefillRooms,
        tier: KvTier,
        stages: StagesNow,
        run_directory: str,
        poller: zmq.Poller,
        failure_probability: float = 0.0,
    ) -> None:
        streams = PeerStreams(run_directory, msgspec.msgpack.Decoder(FromDecode))
        super().__init__(rooms, tier, streams, failure_probability)
        self._stages = stages
        self._door = Door(run_directory, ROOMS_DOOR)
        for descriptor in (self._door.fileno(), self._streams.fileno()):
            poller.register(descriptor, zmq.POLLIN)

    def state(self) -> RoomsState:
        return prefill_state(self._rooms, self._tier)

    def close(self) -> None:
        super().close()
        self._door.close()

    def _take_connections(self, now_s: float) -> None:
        while (accepted := self._door.accept()) is not None:
            self._rooms.connected(self._streams.add(accepted[0], is_server=True), now_s)

    def _connect(self, now_s: float) -> None:
        self._rooms.use_stages(self._stages())


class DecodeEnd(RoomsEnd[DecodeRooms]):
    """A decode server's end, which dials."""

    def __init__(
        self,
        rooms: DecodeRooms,
        tier: KvTier,
        run_directory: str,
        poller: zmq.Poller,
        failure_probability: float = 0.0,
    ) -> None:
        streams = PeerStreams(run_directory, msgspec.msgpack.Decoder(FromPrefill))
        super().__init__(rooms, tier, streams, failure_probability)
        self._dialer = Dialer(run_directory, ROOMS_DOOR)
        for descriptor in (self._dialer.fileno(), self._streams.fileno()):
            poller.register(descriptor, zmq.POLLIN)

    def state(self) -> RoomsState:
        return decode_state(self._rooms, self._tier)

    def _take_connections(self, now_s: float) -> None:
        for address, end in self._dialer.take_ended():
            if isinstance(end, DialError):
                self._rooms.dial_failed(address, str(end), now_s, is_final=end.is_final)
            else:
                session = self._streams.add(end, is_server=False)
                self._rooms.connected(address, session, now_s)

    def _connect(self, now_s: float) -> None:
        for address in self._rooms.peers_to_dial(now_s):
            self._dialer.dial(address)
