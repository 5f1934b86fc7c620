"""Messages over a `SecureStream`: each is its length in bytes, and these bytes.

The messages are msgspec's; `managers/hosts/host_stream.py` sends the same frames in an event loop.
"""

import select
import struct
from collections import deque

from sgl_pipeline.cluster.secure_stream import SecureStream, StreamClosed

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 * 1024 * 1024
_FIRST_ROOM = 64 * 1024


def too_long(num_bytes: int) -> StreamClosed:
    """The error for a frame beyond the limit."""
    return StreamClosed(f"a frame of {num_bytes} bytes; the limit is {MAX_FRAME_BYTES}")


class FramedStream:
    """Frames out are kept until the stream takes them; frames in are handed out whole."""

    def __init__(self, stream: SecureStream) -> None:
        self._stream = stream
        self._room = bytearray(_FIRST_ROOM)
        self._num_read = 0
        self._backlog: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def has_backlog(self) -> bool:
        """True if bytes wait until the file descriptor can be written to."""
        return bool(self._backlog)

    def send(self, payload: bytes) -> None:
        """Sends a frame without waiting. Raises StreamClosed."""
        self._backlog.append(memoryview(LENGTH.pack(len(payload)) + payload))
        self.flush()

    def flush(self) -> bool:
        """Sends what is left of earlier frames; whether nothing is. Raises StreamClosed."""
        if not self._stream.open():
            return False
        while self._backlog:
            frame = self._backlog[0]
            num_written = self._stream.write(frame)
            if num_written < len(frame):
                self._backlog[0] = frame[num_written:]
                return False
            self._backlog.popleft()
        return True

    def receive(self) -> bytes | None:
        """The next frame, if all of it has arrived. Raises StreamClosed."""
        if not self._stream.open():
            return None
        while True:
            length = self._frame_length()
            if length is not None and self._num_read >= LENGTH.size + length:
                return self._take(length)
            num_read = self._stream.read_into(memoryview(self._room)[self._num_read :])
            self._num_read += num_read
            if num_read == 0:
                return None

    def is_idle(self) -> bool:
        """True if the stream is open, and no frame has come that was not taken."""
        try:
            return self.receive() is None
        except StreamClosed:
            return False

    def wait(self, timeout_s: float | None) -> bool:
        """Returns once the stream may have something to read, or has written its backlog, or after
        `timeout_s` (None: never); whether that came first."""
        poller = select.poll()
        poller.register(self, select.POLLIN | (select.POLLOUT if self.has_backlog else 0))
        return bool(poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))

    def close(self) -> None:
        self._stream.close()

    def _frame_length(self) -> int | None:
        """The bytes of the frame at the room's beginning; the room is made large enough for it."""
        if self._num_read < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._room)
        if length > MAX_FRAME_BYTES:
            raise too_long(length)
        if LENGTH.size + length > len(self._room):
            room = bytearray(max(2 * len(self._room), LENGTH.size + length))
            room[: self._num_read] = self._room[: self._num_read]
            self._room = room
        return int(length)

    def _take(self, length: int) -> bytes:
        end = LENGTH.size + length
        payload = bytes(self._room[LENGTH.size : end])
        self._room[: self._num_read - end] = self._room[end : self._num_read]
        self._num_read -= end
        return payload
