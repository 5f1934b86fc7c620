"""Both ends of a stream of rows to a stage of another host.

Within a host, `buffered_link.py` takes its place. The downstream end has a door at its host's
cluster port (`cluster/doors.py`), and the upstream end dials with its first rows. Neither end ever
makes its stage wait: a thread writes the bytes that the network does not take at once, and rows are
read, as they arrive, into buffers that stay.
"""

import contextlib
import queue
import select
import struct
import threading
import time
from typing import NamedTuple

import torch

from sgl_pipeline.cluster.doors import DialError, Door, dial
from sgl_pipeline.cluster.secure_stream import SecureStream, StreamClosed
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.base.compute_threads import use_every_core
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape

_NEWS = struct.Struct("<qqq")  # tag, rows, bytes of a row; then the rows
_FEWEST_ROWS = 64  # of a buffer; all hold a power of two, so that steps share them
REDIAL_S = 0.05
HANDSHAKE_TIMEOUT_S = 5.0
# Seconds in which sent messages may leave the host after the last send.
LINGER_S = 5.0


def split_link(address: str) -> tuple[str, str]:
    """The cluster port and the door of `HOST:PORT/DOOR`."""
    host, _, door = address.partition("/")
    return host, door


class _Outgoing(NamedTuple):
    """`data` lies in `buffer`; its first `num_written` bytes have been written."""

    buffer: torch.Tensor
    data: memoryview
    num_written: int


class TcpOutbox:
    """The upstream end, with the methods of `buffered_link.Outbox`."""

    def __init__(self, address: str, shape: ActivationShape, run_directory: str) -> None:
        self._address = address
        self._run_directory = run_directory
        self._shape = shape
        self._free: list[torch.Tensor] = []
        self._waiting: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._num_waiting = 0
        self._stream: SecureStream | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_gone = False
        # Guards the stream, the count and the free buffers; never held during a wait.
        self._lock = threading.Lock()

    def send(self, tag: int, rows: torch.Tensor) -> None:
        """Hands over `rows` [T, hidden] without waiting. Raises ConnectionError when the other end
        is gone."""
        if self._is_gone:
            raise ConnectionError
        outgoing = self._pack(tag, rows)
        with self._lock:
            if self._stream is not None and self._num_waiting == 0:
                outgoing = self._write(self._stream, outgoing)
                if outgoing.num_written == len(outgoing.data):
                    self._free.append(outgoing.buffer)
                    return
            self._num_waiting += 1
        self._start_thread()
        self._waiting.put(outgoing)

    def num_unread(self) -> int:
        """Number of messages that have not left this host. Raises ConnectionError while the other
        end does not listen, and when it is gone."""
        self._start_thread()
        if self._is_gone or self._stream is None:
            raise ConnectionError
        return self._num_waiting

    def close(self) -> None:
        """Sent messages still have `LINGER_S` to leave this host, if the other end listens."""
        self._is_closed = True
        self._waiting.put(None)

    def _pack(self, tag: int, rows: torch.Tensor) -> _Outgoing:
        num_rows, row_bytes = rows.shape[0], self._shape.row_bytes
        num_bytes = _NEWS.size + num_rows * row_bytes
        buffer = self._buffer_of(num_bytes)
        data = _bytes_of(buffer)[:num_bytes]
        _NEWS.pack_into(data, 0, tag, num_rows, row_bytes)
        if num_rows:
            plain = rows.contiguous().view(torch.uint8).view(-1)
            buffer[_NEWS.size : num_bytes].copy_(plain)
        return _Outgoing(buffer, data, 0)

    def _buffer_of(self, num_bytes: int) -> torch.Tensor:
        """A free buffer of this size or more."""
        with self._lock:
            for place, buffer in enumerate(self._free):
                if buffer.numel() >= num_bytes:
                    return self._free.pop(place)
        least = max(num_bytes, _NEWS.size + _FEWEST_ROWS * self._shape.row_bytes)
        return torch.empty(1 << (least - 1).bit_length(), dtype=torch.uint8)

    def _write(self, stream: SecureStream, outgoing: _Outgoing) -> _Outgoing:
        """Writes as much as the network takes now. Raises ConnectionError when the other end is
        gone."""
        buffer, data, num_written = outgoing
        try:
            num_written += stream.write(data[num_written:])
        except StreamClosed as ending:
            self._is_gone = True
            raise ConnectionError(str(ending)) from ending
        return _Outgoing(buffer, data, num_written)

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rows", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Connects, and writes the rest of the messages."""
        use_every_core()
        stream = self._connect()
        if stream is None:
            self._is_gone = True
            return
        with self._lock:
            self._stream = stream
        with contextlib.suppress(ConnectionError):
            while (outgoing := self._waiting.get()) is not None:
                self._write_all(stream, outgoing)
                with self._lock:
                    self._num_waiting -= 1
                    self._free.append(outgoing.buffer)
        self._is_gone = True
        stream.close()

    def _write_all(self, stream: SecureStream, outgoing: _Outgoing) -> None:
        poller = select.poll()
        poller.register(stream, select.POLLOUT)
        closed_s = None
        while True:
            with self._lock:
                outgoing = self._write(stream, outgoing)
            if outgoing.num_written == len(outgoing.data):
                return
            poller.poll(100)
            if self._is_closed:
                closed_s = closed_s or time.monotonic()
                if time.monotonic() - closed_s > LINGER_S:
                    raise ConnectionError

    def _connect(self) -> SecureStream | None:
        """Dials until the other end listens; None when the link was closed meanwhile."""
        address, door = split_link(self._address)
        closed_s = None
        while True:
            with contextlib.suppress(DialError, StreamClosed):
                connection = dial(address, door, self._run_directory)
                stream = SecureStream(connection, self._run_directory, is_server=False)
                if shake_hands(stream, HANDSHAKE_TIMEOUT_S):
                    return stream
                stream.close()
            if self._is_closed:
                closed_s = closed_s or time.monotonic()
                if self._waiting.qsize() <= 1 or time.monotonic() - closed_s > LINGER_S:
                    return None
            time.sleep(REDIAL_S)


class TcpInbox:
    """The downstream end, with the methods of `buffered_link.Inbox`."""

    def __init__(self, door: str, shape: ActivationShape, run_directory: str) -> None:
        self._run_directory = run_directory
        self._shape = shape
        self._door = Door(run_directory, door)
        self._ready = select.epoll()
        self._ready.register(self._door, select.EPOLLIN)
        # Connections whose handshake is under way, and its start. The first that completes it is
        # the stage upstream.
        self._strangers: list[tuple[SecureStream, float]] = []
        self._stream: SecureStream | None = None
        self._news = bytearray(_NEWS.size)
        self._num_read = 0  # of the news and the rows behind it
        # Rows that were taken stay as they are until others are taken.
        self._buffers = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        self._is_gone = False

    @property
    def descriptor(self) -> int:
        """Can be read when `has_news` may have come true."""
        return self._ready.fileno()

    def has_news(self, timeout_s: float = 0.0) -> bool:
        """Waits up to `timeout_s`; True if all of the next message has arrived, or the other end is
        gone."""
        deadline_s = time.monotonic() + timeout_s
        while not self._advance():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0.0 or not self._ready.poll(left_s):
                return self._advance()
        return True

    def take(self) -> tuple[int, torch.Tensor] | None:
        """The next tag and its rows, waited for; None when the other end is gone. The rows are
        valid until the next call."""
        while not self.has_news(1.0):
            pass
        if self._is_gone:
            return None
        tag, num_rows, row_bytes = _NEWS.unpack(self._news)
        self._num_read = 0
        self._buffers.reverse()
        rows = self._buffers[1][: num_rows * row_bytes].view(self._shape.dtype)
        return tag, rows.view(num_rows, self._shape.hidden_size).to(self._shape.device)

    def close(self) -> None:
        self._door.close()
        self._ready.close()
        for stream, _ in self._strangers:
            stream.close()
        if self._stream is not None:
            self._stream.close()

    def _advance(self) -> bool:
        """Reads what has arrived; whether a whole message or the end is there."""
        if self._is_gone:
            return True
        if self._stream is None:
            self._stream = self._meet()
            if self._stream is None:
                return False
        try:
            return self._read(self._stream)
        except StreamClosed:
            self._is_gone = True
            return True

    def _meet(self) -> SecureStream | None:
        """Accepts new connections, and the stage upstream once it has authenticated."""
        now_s = time.monotonic()
        while (accepted := self._door.accept()) is not None:
            stream = SecureStream(accepted[0], self._run_directory, is_server=True)
            self._ready.register(stream, select.EPOLLIN)
            self._strangers.append((stream, now_s))
        for stranger in [*self._strangers]:
            stream, since_s = stranger
            try:
                if stream.open():
                    self._strangers.remove(stranger)
                    return stream
                is_late = now_s - since_s > HANDSHAKE_TIMEOUT_S
            except StreamClosed:
                is_late = True
            if is_late:
                self._strangers.remove(stranger)
                self._ready.unregister(stream)
                stream.close()
        return None

    def _read(self, stream: SecureStream) -> bool:
        if self._num_read < _NEWS.size:
            self._num_read += stream.read_into(memoryview(self._news)[self._num_read :])
            if self._num_read < _NEWS.size:
                return False
        _, num_rows, row_bytes = _NEWS.unpack(self._news)
        if row_bytes != self._shape.row_bytes or num_rows < 0:
            raise ProtocolError(
                f"expected rows of {self._shape.row_bytes} bytes, received {num_rows} of "
                f"{row_bytes}"
            )
        num_bytes = num_rows * row_bytes
        if self._buffers[0].numel() < num_bytes:
            least = max(num_bytes, _FEWEST_ROWS * row_bytes)
            self._buffers[0] = torch.empty(1 << (least - 1).bit_length(), dtype=torch.uint8)
        start = self._num_read - _NEWS.size
        room = _bytes_of(self._buffers[0])[start:num_bytes]
        self._num_read += stream.read_into(room)
        return self._num_read == _NEWS.size + num_bytes


def _bytes_of(buffer: torch.Tensor) -> memoryview:
    """The bytes of a buffer (uint8), in place."""
    return memoryview(buffer.numpy().data)


def shake_hands(stream: SecureStream, timeout_s: float) -> bool:
    """Waits for the handshake; True if it was done in time. Raises StreamClosed."""
    deadline_s = time.monotonic() + timeout_s
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    while not stream.open():
        if time.monotonic() > deadline_s:
            return False
        poller.poll(100)
    return True
