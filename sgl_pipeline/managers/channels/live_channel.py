"""The channel from the scheduler process to the live page: its socket, and both ends' messages.

`reports/live_report.py` sends, `entrance/live_hub.py` receives: one `ipc://` socket in the run
directory, however many pages look. A socket without subscribers costs nothing, and one whose
subscriber is slow never waits. Request ids and counts only: never a token or a text.
"""

import os
from typing import Any

import msgspec
import zmq

from sgl_pipeline.pipeline.pipeline_state import PipelineState

# Some ten seconds of ticks; what the HTTP server's process has not taken by then is left out.
MAX_UNREAD_TICKS = 50
# Requests whose way through the pipeline is reported in full: the page gives its own such an id.
FOLLOWED_PREFIX = "ui-"


class QueueLine(msgspec.Struct, frozen=True, array_like=True):
    """A waiting request: for how long, with how many prompt tokens, and what holds it
    (`scheduling.Explanation`)."""

    request_id: str
    waited_s: float
    prompt_tokens: int
    num_retractions: int
    rule: str
    text: str
    behind: str | None


class FollowedRequest(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a followed request; counts are tokens."""

    request_id: str
    state: str  # waiting, running, finished
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    steps_in_flight: int
    text: str  # what it waits for


class CarriedChunk(msgspec.Struct, frozen=True, array_like=True):
    """A step carried `length` tokens of a followed request from position `start`."""

    step_id: int
    request_id: str
    start: int
    length: int
    is_decode: bool


class LiveHello(msgspec.Struct, frozen=True, tag=True):
    """The first message to a new subscriber: how the pipeline was started."""

    facts: dict[str, Any]


class LiveTick(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The pipeline's state, and the events since the tick before.

    `state` has only the steps that ended since then, and only where they have changed the moves.
    `queue` and `curve`, the milliseconds of steps of `CURVE_DECODES`, are None when they were not
    looked at. `missed_ticks` could not be sent before this one.
    """

    state: PipelineState
    queue: tuple[QueueLine, ...] | None
    curve: tuple[float, ...] | None = None
    followed: tuple[FollowedRequest, ...]
    carried: tuple[CarriedChunk, ...]
    missed_ticks: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LiveHello | LiveTick)


def live_address(run_directory: str) -> str:
    """The address at which the scheduler process offers the channel."""
    return "ipc://" + os.path.join(run_directory, "live")


def read_message(frame: bytes) -> LiveHello | LiveTick:
    """Raises msgspec.DecodeError for anything else."""
    return _decoder.decode(frame)


class LiveSocket:
    """The scheduler process's end. No method waits."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self._socket = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNREAD_TICKS)
        # A full queue is an error to be counted, and each subscription is reported.
        self._socket.setsockopt(zmq.XPUB_NODROP, 1)
        self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._socket.bind(address)
        self._num_subscribers = 0

    @property
    def is_watched(self) -> bool:
        """True if a page subscribed by the last `take_subscriptions`."""
        return self._num_subscribers > 0

    def take_subscriptions(self) -> bool:
        """Hears which viewers have come and gone. Whether any has come."""
        has_come = False
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return has_come
            if frame[:1] == b"\x01":
                has_come = True
                self._num_subscribers += 1
            else:
                self._num_subscribers -= 1

    def send(self, message: LiveHello | LiveTick) -> bool:
        """False where a subscriber has not taken what was sent before: then none gets it."""
        try:
            self._socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close(linger=0)
