"""The prefill servers that a decode server knows: dialed while a room needs one, greeted, watched.

A server that cannot be reached, hangs or refuses loses its rooms. Ends of rooms are said again in
the next session, because those that were sent last in a stream that broke may not have arrived; a
server that refuses hears them before the session is closed.
"""

from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Protocol

from sgl_pipeline.disaggregation.heartbeat import Heartbeat
from sgl_pipeline.disaggregation.identity import ServerIdentity
from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.disaggregation.room_messages import (
    AboutRoom,
    End,
    FromDecode,
    FromPrefill,
    Got,
    PeerRejected,
    PeerStages,
    PeerWelcome,
    Ping,
)
from sgl_pipeline.wire.store_orders import PeerPlace, PeerStage

# At a time: their addresses come with requests.
MOST_PEERS = 64
REDIAL_S = 1.0
# Where no room waits for it; also the most ends that are kept for it meanwhile.
LONGEST_REDIAL_S = 30.0
MOST_ENDS = 1_000
# How long a server may be out of reach before its rooms fail.
UNREACHABLE_S = 3.0


class PeerUser(Protocol):
    """Whoever needs prefill servers."""

    def on_met(self, address: str) -> None:
        """A server can be asked for rooms from now on."""

    def on_lost(self, address: str, reason: str, status: int, now_s: float) -> None:
        """All rooms of a server fail, with an HTTP `status`."""

    def on_places(self, places: tuple[PeerPlace, ...]) -> None:
        """Pages can be read from these servers, and from no others."""


@dataclass(slots=True, eq=False)
class _Peer:
    """A prefill server: not dialed, being dialed, greeted, or known (`stages`). `ends` are of
    rooms that have failed here, each with its moment; it may not have heard of them."""

    session: int | None = None
    heartbeat: Heartbeat | None = None
    stages: tuple[PeerStage, ...] | None = None
    epoch: int = -1
    lent_tokens: int = 0
    is_dialing: bool = False
    redial_s: float = float("-inf")
    rest_s: float = REDIAL_S
    failing_since_s: float | None = None
    ends: deque[tuple[float, End | Got]] = field(default_factory=lambda: deque(maxlen=MOST_ENDS))


class PrefillServers:
    """By their addresses. A driver sends `outbox` and closes the sessions `closing`."""

    def __init__(self, identity: ServerIdentity, limits: RoomLimits, user: PeerUser) -> None:
        self._identity, self._limits, self._user = identity, limits, user
        self._peers: dict[str, _Peer] = {}
        self._address_of: dict[int, str] = {}  # by session
        self.outbox: list[tuple[int, FromDecode]] = []
        self.closing: list[int] = []

    # What a room needs

    def can_know(self, address: str) -> bool:
        """True if there is room for this server."""
        return address in self._peers or len(self._peers) < MOST_PEERS

    def know(self, address: str, now_s: float) -> None:
        """A room needs the server from now on; there is room for it."""
        peer = self._peers.setdefault(address, _Peer())
        peer.redial_s = min(peer.redial_s, now_s + REDIAL_S)

    def send(self, address: str, message: FromDecode) -> None:
        """Sends a message about a room; drops it where the server has not been met."""
        peer = self._peers[address]
        if peer.stages is not None:
            self._send(peer, message)

    def send_end(self, address: str, end: End | Got, now_s: float) -> None:
        """Sends the end of a room now, and again in the next session."""
        self._peers[address].ends.append((now_s, end))
        self.send(address, end)

    @property
    def num_met(self) -> int:
        """Servers that can be asked for rooms."""
        return sum(peer.stages is not None for peer in self._peers.values())

    def lent_tokens_of(self, address: str) -> int:
        """Tokens whose pages a server can lend in all; 0 where it has not been met."""
        return self._peers[address].lent_tokens

    def lent_tokens(self) -> tuple[int, ...]:
        """The tokens that each server lends, of those that lend any."""
        return tuple(peer.lent_tokens for peer in self._peers.values() if peer.lent_tokens)

    # Streams

    def to_dial(self, now_s: float, needed: Callable[[], Set[str]]) -> list[str]:
        """The addresses to dial now, of those that rooms need; an end is to be told to others."""
        due = [
            address
            for address, peer in self._peers.items()
            if peer.session is None and not peer.is_dialing and now_s >= peer.redial_s
        ]
        if due:
            by_rooms = needed()
            due = [one for one in due if one in by_rooms or self._peers[one].ends]
        for address in due:
            self._peers[address].is_dialing = True
        return due

    def connected(self, address: str, session: int, now_s: float) -> None:
        """A server that was dialed has been reached."""
        peer = self._peers[address]
        peer.is_dialing = False
        peer.session, peer.heartbeat = session, Heartbeat(now_s, self._limits.silence_s)
        self._address_of[session] = address
        self._send(peer, self._identity.hello())

    def dial_failed(self, address: str, reason: str, now_s: float, *, is_final: bool) -> None:
        """A server that was dialed was not reached; nor will it be, if that `is_final`."""
        self._peers[address].is_dialing = False
        self._not_reached(address, reason, now_s, is_final=is_final)

    def disconnected(self, session: int, reason: str, now_s: float) -> None:
        """A stream has ended."""
        address = self._address_of.get(session)
        if address is None:
            return
        if self._peers[address].stages is None:
            self._forget_session(address)
            self._not_reached(address, f"{address}: {reason}", now_s, is_final=False)
        else:
            self._lose(address, f"{address} is gone: {reason}", 503, now_s)

    def take(
        self, session: int, message: FromPrefill, now_s: float
    ) -> tuple[str, AboutRoom] | None:
        """A message about a room, with the address that it came from; all others are taken here,
        and those of sessions that are over have no effect."""
        address = self._address_of.get(session)
        if address is None:
            return None
        peer = self._peers[address]
        assert peer.heartbeat is not None
        peer.heartbeat.heard(now_s)
        if isinstance(message, PeerWelcome | PeerStages):
            self._meet(address, peer, message, now_s)
        elif isinstance(message, PeerRejected):
            self._give_up(address, message.reason, 500, now_s)
            # The last messages of the session: no later one will get further.
            self.outbox.extend((session, end) for _, end in peer.ends)
            peer.ends.clear()
        elif isinstance(message, AboutRoom):
            return address, message
        return None

    def tick(self, now_s: float, needed: Set[str]) -> None:
        """Pings those that are there, gives up those that are silent, and forgets those of which
        nothing is `needed` any more."""
        for address, peer in [*self._peers.items()]:
            if peer.heartbeat is not None:
                if peer.heartbeat.is_dead(now_s):
                    self._give_up(address, f"{address} is silent", 503, now_s)
                elif peer.heartbeat.is_due(now_s):
                    self._send(peer, Ping())
            while peer.ends and now_s - peer.ends[0][0] > self._limits.bootstrap_timeout_s:
                peer.ends.popleft()  # it has waited long enough for the room
            is_open = peer.session is not None or peer.is_dialing
            if not is_open and address not in needed and not peer.ends:
                del self._peers[address]

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
        peer.lent_tokens = message.lent_tokens
        peer.failing_since_s, peer.rest_s = None, REDIAL_S
        self._tell_places()
        if is_new:
            for _, end in peer.ends:
                self._send(peer, end)
            self._user.on_met(address)

    def _tell_places(self) -> None:
        digest = self._identity.digest
        places = [
            PeerPlace(name=address, digest=digest, stages=_seen_from_here(address, peer.stages))
            for address, peer in self._peers.items()
            if peer.stages is not None
        ]
        self._user.on_places(tuple(places))

    def _lose(self, address: str, reason: str, status: int, now_s: float) -> None:
        """Ends all rooms of a server, and the session with it, if there is one."""
        was_met = self._peers[address].stages is not None
        self._forget_session(address)
        self._user.on_lost(address, reason, status, now_s)
        if was_met:
            self._tell_places()

    def _give_up(self, address: str, reason: str, status: int, now_s: float) -> None:
        """As `_lose`, for a session that this end closes."""
        session = self._peers[address].session
        assert session is not None
        self.closing.append(session)
        self._lose(address, reason, status, now_s)

    def _not_reached(self, address: str, reason: str, now_s: float, *, is_final: bool) -> None:
        """There is no session, and another attempt will be made a while later if one is needed."""
        peer = self._peers[address]
        if peer.failing_since_s is None:
            peer.failing_since_s = now_s
        if is_final or now_s - peer.failing_since_s >= UNREACHABLE_S:
            self._lose(address, reason, 503, now_s)
            peer.rest_s = min(2 * peer.rest_s, LONGEST_REDIAL_S)
        if is_final:
            peer.ends.clear()
        peer.redial_s = now_s + peer.rest_s

    def _forget_session(self, address: str) -> None:
        peer = self._peers[address]
        if peer.session is not None:
            del self._address_of[peer.session]
        peer.session = peer.heartbeat = peer.stages = None
        peer.epoch, peer.lent_tokens = -1, 0

    def _send(self, peer: _Peer, message: FromDecode) -> None:
        assert peer.session is not None
        self.outbox.append((peer.session, message))


def _seen_from_here(address: str, stages: tuple[PeerStage, ...]) -> tuple[PeerStage, ...]:
    """The stages of the server that was dialed at `address`, each with its host."""
    return tuple(
        PeerStage(
            f"{address}{one.address}" if one.address.startswith("/") else one.address, one.layers
        )
        for one in stages
    )


def _has_all_layers(stages: tuple[PeerStage, ...], num_layers: int) -> bool:
    """True if each layer of the model is on one of the stages."""
    layers = [layer for stage in stages for layer in range(*stage.layers)]
    return layers == list(range(num_layers))
