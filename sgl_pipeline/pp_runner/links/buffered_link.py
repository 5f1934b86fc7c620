"""Rows in buffers that two stages of one host both have open, and news of them through a socket.

What `host_link`, `cuda_ipc_link` and `page_link` have in common: who owns a buffer, when it is free
again, what crosses the socket. The stage upstream puts rows into a free buffer and tells its number
and a tag, of activations the step id; the stage downstream reads them where they lie, and gives the
buffer back when it asks for the next rows. What a buffer is, and how it becomes known on the other
side, is a `Buffers`'.

The downstream end listens, and the upstream end connects with its first rows. A neighbor that is
gone is the launcher's to notice: what is sent to it is dropped, and who waits for it is told.
"""

import contextlib
import os
import select
import socket
import struct
from typing import Generic, Protocol, TypeVar

import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.links.activation_link import NeighborGone

_NEWS = struct.Struct("<qqq")  # tag, rows, number of the buffer; then what `introduce` says
_RETURN = struct.Struct("<q")  # number of the buffer; then what `after_reading` says
MAX_UNREAD = 4  # buffers; their memory stays with the link
_FEWEST_ROWS = 64  # of a buffer; all hold a power of two, so that steps share them

B = TypeVar("B")


class Buffers(Protocol[B]):
    """One kind of buffer, for both ends. Data that crosses is fixed structs, never pickles."""

    news_bytes: int  # of what `introduce` adds to news
    return_bytes: int  # of what `after_reading` adds to a return

    def make(self, num_rows: int) -> B:
        """Upstream: a buffer of that many rows."""

    def capacity(self, buffer: B) -> int:
        """Its rows."""

    def write(self, buffer: B, hidden: torch.Tensor) -> None:
        """Upstream: puts `hidden` [T, hidden] into its first rows."""

    def introduce(self, buffer: B, first_time: bool) -> tuple[bytes, list[int]]:
        """Upstream: what the other side needs to read it, and file descriptors for it, which are
        closed here when they are sent."""

    def came_back(self, buffer: B, data: bytes) -> None:
        """Upstream: the other side has said `after_reading`."""

    def open(self, data: bytes, descriptors: list[int]) -> B:
        """Downstream: the buffer that `introduce` tells of, when it is new. Closes descriptors."""

    def read(self, buffer: B, num_rows: int) -> torch.Tensor:
        """Downstream: its first rows, on the stage's device."""

    def after_reading(self, buffer: B) -> bytes:
        """Downstream: what the other side must know before it writes to the buffer again."""


class RowInbox(Protocol):
    """A downstream end; see `Inbox`."""

    def take(self) -> tuple[int, torch.Tensor] | None: ...
    def has_news(self, timeout_s: float = 0.0) -> bool: ...
    @property
    def descriptor(self) -> int: ...
    def close(self) -> None: ...


class RowOutbox(Protocol):
    """An upstream end; see `Outbox`."""

    def send(self, tag: int, rows: torch.Tensor) -> None: ...
    def num_unread(self) -> int: ...
    def close(self) -> None: ...


class RowLink:
    """Rows of the residual stream, from one end to another, each of whatever kind."""

    def __init__(self, inbox: RowInbox | None, outbox: RowOutbox | None) -> None:
        self._inbox = inbox
        self._outbox = outbox

    def send(self, step_id: int, hidden: torch.Tensor) -> None:
        assert self._outbox is not None, "the last stage has no stage to send to"
        # A neighbor that has closed its end has taken the address away as well.
        with contextlib.suppress(ConnectionError, FileNotFoundError):
            self._outbox.send(step_id, hidden)

    def has_room(self) -> bool:
        assert self._outbox is not None, "the last stage has no stage to send to"
        with contextlib.suppress(OSError):
            return self._outbox.num_unread() < MAX_UNREAD
        return True  # what is sent to a neighbor that is gone is dropped

    def receive(self, step_id: int, num_rows: int) -> torch.Tensor:
        """The rows are to be read only, and by nothing that is asked for after the next one."""
        assert self._inbox is not None, "the first stage has no stage to receive from"
        received = self._inbox.take()
        if received is None:
            raise NeighborGone
        sent_step_id, rows = received
        if (sent_step_id, len(rows)) != (step_id, num_rows):
            raise ProtocolError(
                f"expected {num_rows} rows of activations of step {step_id}, "
                f"received {len(rows)} rows of step {sent_step_id}"
            )
        return rows

    def has_rows(self) -> bool:
        assert self._inbox is not None, "the first stage has no stage to receive from"
        return self._inbox.has_news()

    @property
    def descriptor(self) -> int | None:
        return None if self._inbox is None else self._inbox.descriptor

    def close(self) -> None:
        for end in (self._inbox, self._outbox):
            if end is not None:
                end.close()


class BufferedLink(RowLink, Generic[B]):
    """Both ends in `buffers`; paths are Unix sockets in the run directory."""

    def __init__(self, upstream: str | None, downstream: str | None, buffers: Buffers[B]) -> None:
        super().__init__(
            Inbox(upstream, buffers) if upstream is not None else None,
            Outbox(downstream, buffers) if downstream is not None else None,
        )


class Outbox(Generic[B]):
    """The upstream end: owns the buffers. Connects with the first rows, or when asked."""

    def __init__(self, path: str, buffers: Buffers[B]) -> None:
        self._path = path
        self._buffers = buffers
        self._socket: socket.socket | None = None
        self._made: list[B] = []  # by number
        self._free: list[int] = []

    def send(self, tag: int, rows: torch.Tensor) -> None:
        """Hands over `rows` without waiting. Raises ConnectionError when the other end is gone."""
        neighbor = self._connected()
        self._take_back(neighbor)
        number, is_new = self._buffer_for(rows.shape[0])
        self._buffers.write(self._made[number], rows)
        data, descriptors = self._buffers.introduce(self._made[number], is_new)
        try:
            socket.send_fds(neighbor, [_NEWS.pack(tag, rows.shape[0], number) + data], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def num_unread(self) -> int:
        """Buffers that the other end has not given back. Raises OSError while it does not listen,
        and ConnectionError when it is gone."""
        self._take_back(self._connected())
        return len(self._made) - len(self._free)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _connected(self) -> socket.socket:
        if self._socket is None:
            connecting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connecting.connect(self._path)
            except OSError:
                connecting.close()
                raise
            self._socket = connecting
        return self._socket

    def _take_back(self, neighbor: socket.socket) -> None:
        """Frees the buffers that the neighbor has done with."""
        num_bytes = _RETURN.size + self._buffers.return_bytes
        with contextlib.suppress(BlockingIOError):
            while returned := neighbor.recv(num_bytes, socket.MSG_DONTWAIT):
                (number,) = _RETURN.unpack_from(returned)
                self._buffers.came_back(self._made[number], returned[_RETURN.size :])
                self._free.append(number)

    def _buffer_for(self, num_rows: int) -> tuple[int, bool]:
        """The number of a free buffer, and whether the neighbor has never seen it."""
        for number in self._free:
            if self._buffers.capacity(self._made[number]) >= num_rows:
                self._free.remove(number)
                return number, False
        capacity = max(_FEWEST_ROWS, 1 << (num_rows - 1).bit_length())
        self._made.append(self._buffers.make(capacity))
        return len(self._made) - 1, True


class Inbox(Generic[B]):
    """The downstream end."""

    def __init__(self, path: str, buffers: Buffers[B]) -> None:
        self._path = path
        self._buffers = buffers
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(1)
        self._socket: socket.socket | None = None
        self._opened: dict[int, B] = {}
        self._in_use: int | None = None

    def take(self) -> tuple[int, torch.Tensor] | None:
        """The next tag and its rows, waited for; None when the other end is gone. The rows are
        valid until the next call."""
        if self._socket is None:
            self._socket, _ = self._listener.accept()
        self._give_back(self._socket)
        num_bytes = _NEWS.size + self._buffers.news_bytes
        try:
            news, descriptors, *_ = socket.recv_fds(self._socket, num_bytes, 1)
        except ConnectionError:
            return None
        if not news:
            return None
        tag, num_rows, number = _NEWS.unpack_from(news)
        if number not in self._opened:
            self._opened[number] = self._buffers.open(news[_NEWS.size :], descriptors)
        self._in_use = number
        return tag, self._buffers.read(self._opened[number], num_rows)

    @property
    def descriptor(self) -> int:
        """Can be read when `has_news` may have come true."""
        return (self._socket or self._listener).fileno()

    def close(self) -> None:
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        if self._socket is not None:
            self._socket.close()

    def has_news(self, timeout_s: float = 0.0) -> bool:
        """Whether the other end has sent something, or is gone, within `timeout_s`."""
        if self._socket is None:
            if not _is_readable(self._listener, timeout_s):
                return False
            self._socket, _ = self._listener.accept()
        return _is_readable(self._socket, timeout_s)

    def _give_back(self, neighbor: socket.socket) -> None:
        """All that reads the last step's rows has been done or launched."""
        if self._in_use is None:
            return
        data = self._buffers.after_reading(self._opened[self._in_use])
        with contextlib.suppress(ConnectionError):
            neighbor.send(_RETURN.pack(self._in_use) + data)
        self._in_use = None


def _is_readable(end: socket.socket, timeout_s: float) -> bool:
    readable, _, _ = select.select([end], [], [], timeout_s)
    return bool(readable)
