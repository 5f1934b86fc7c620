"""The way from a stage to one stage of a peer, which attends for it.

Whatever is wrong with it ends the stream, and for `REDIAL_PAUSE_S` there is no other: until then
all that would go this way is lost at once, and no step waits.
"""

import time

from sgl_pipeline.cluster.doors import DialError, dial
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.secure_stream import SecureStream, StreamClosed
from sgl_pipeline.errors import MalformedData, PeerLost
from sgl_pipeline.pp_runner.links.tcp_link import shake_hands, split_link
from sgl_pipeline.wire.attention_messages import (
    AttendedRows,
    AttendRows,
    PlanAttention,
    encode,
    read_answer,
)

# From the send of a layer's rows to their results, and of a dial.
ANSWER_LIMIT_S = 2.0
REDIAL_PAUSE_S = 1.0


class ExecutorStream:
    """Dialed with the first plan, and again with the first one after its end.

    Args:
        address: `HOST:PORT/DOOR`.
        run_directory: where the keys are.
    """

    def __init__(self, address: str, run_directory: str) -> None:
        self._address, self._run_directory = address, run_directory
        self._stream: FramedStream | None = None
        self._not_before_s = 0.0
        self._sent_s = 0.0

    def plan(self, plan: PlanAttention) -> None:
        """Sends the plan of a step. Raises PeerLost."""
        if self._stream is not None and not self._stream.is_idle():
            self.close()  # the other end has gone between two steps: it may be another stage now
        if self._stream is None:
            self._stream = self._dial()
        self._send(encode(plan))

    def send(self, rows: AttendRows) -> None:
        """Sends the rows of a layer of the step that was planned. Raises PeerLost."""
        self._sent_s = time.monotonic()
        self._send(encode(rows))

    def receive(self, layer: int, num_bytes: int) -> AttendedRows:
        """Waits for the `num_bytes` of results of the rows that were sent. Raises PeerLost."""
        try:
            answer = read_answer(self._receive())
        except MalformedData as error:
            raise self._lost(f"it sent a malformed message: {error}") from error
        if (answer.layer, len(answer.output)) != (layer, num_bytes):
            raise self._lost(
                f"it sent {len(answer.output)} bytes of layer {answer.layer}, when {num_bytes} of "
                f"layer {layer} were due"
            )
        return answer

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _send(self, payload: bytes) -> None:
        assert self._stream is not None
        try:
            self._stream.send(payload)
        except StreamClosed as ending:
            raise self._lost(f"the connection ended: {ending}") from ending

    def _receive(self) -> bytes:
        assert self._stream is not None
        limit_s = self._sent_s + ANSWER_LIMIT_S
        try:
            while (payload := self._stream.receive()) is None:
                self._stream.flush()
                if not self._stream.wait(limit_s - time.monotonic()):
                    raise self._lost(f"it did not answer within {ANSWER_LIMIT_S:g} s")
        except StreamClosed as ending:
            raise self._lost(f"the connection ended: {ending}") from ending
        return payload

    def _dial(self) -> FramedStream:
        if time.monotonic() < self._not_before_s:
            raise PeerLost(f"{self._address} was lost a moment ago")
        host, door = split_link(self._address)
        try:
            connection = dial(host, door, self._run_directory, ANSWER_LIMIT_S)
        except DialError as error:
            raise self._lost(str(error)) from error
        stream = SecureStream(connection, self._run_directory, is_server=False)
        try:
            is_open = shake_hands(stream, ANSWER_LIMIT_S)
        except StreamClosed as ending:
            stream.close()
            raise self._lost(str(ending)) from ending
        if not is_open:
            stream.close()
            raise self._lost(f"no handshake within {ANSWER_LIMIT_S:g} s")
        return FramedStream(stream)

    def _lost(self, reason: str) -> PeerLost:
        """Ends the stream; the error to raise."""
        self.close()
        self._not_before_s = time.monotonic() + REDIAL_PAUSE_S
        return PeerLost(f"{self._address}: {reason}")
