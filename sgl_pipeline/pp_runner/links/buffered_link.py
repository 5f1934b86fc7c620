"""Rows in buffers that two stages of one host both have open, announced through a socket.

The common part of `host_link` and `page_link`: who owns a buffer, when it is free again, what
crosses the socket. The stage upstream puts rows into a free buffer and sends its number and a tag
(for activations the step id); the stage downstream reads them in place, and gives the buffer back
when it asks for the next rows. A `Buffers` defines a buffer and its announcement to the other side.

The downstream end listens, and the upstream end connects with its first rows. The launcher notices
a neighbor that is gone: rows sent to it are dropped, and a receiver that waits for it gets an
error.
"""

import contextlib
import os
import select
import socket
import struct
from typing import Protocol

import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.links.activation_link import NeighborGone

_NEWS = struct.Struct("<qqq")  # tag, rows, number of the buffer; with a descriptor if that is new
_RETURN = struct.Struct("<q")  # number of the buffer
MAX_UNREAD = 4  # buffers; their memory stays with the link
_FEWEST_ROWS = 64  # of a buffer; all hold a power of two, so that steps share them


class Buffers(Protocol):
    """Memory that both ends have open; a buffer of it is [capacity, hidden]."""

    def make(self, num_rows: int) -> tuple[torch.Tensor, int]:
        """Upstream: a buffer of this many rows, and the file descriptor by which the other end
        opens it. The caller closes that."""

    def open(self, descriptor: int) -> torch.Tensor:
        """Downstream: the buffer. Closes the descriptor."""

    def read(self, buffer: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Downstream: its first rows, on the stage's device."""


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
    """Rows of the residual stream between two ends, each of any kind."""

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
        return True  # rows for a neighbor that is gone are dropped

    def receive(self, step_id: int, num_rows: int) -> torch.Tensor:
        """The rows must not be written to, and must not be used after the next call."""
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


class BufferedLink(RowLink):
    """Both ends in `buffers`; paths are Unix sockets in the run directory."""

    def __init__(self, upstream: str | None, downstream: str | None, buffers: Buffers) -> None:
        super().__init__(
            Inbox(upstream, buffers) if upstream is not None else None,
            Outbox(downstream, buffers) if downstream is not None else None,
        )


class Outbox:
    """The upstream end: owns the buffers. Connects with the first rows, or when asked."""

    def __init__(self, path: str, buffers: Buffers) -> None:
        self._path = path
        self._buffers = buffers
        self._socket: socket.socket | None = None
        self._made: list[torch.Tensor] = []  # by number
        self._free: list[int] = []

    def send(self, tag: int, rows: torch.Tensor) -> None:
        """Hands over `rows` without waiting. Raises ConnectionError when the other end is gone."""
        neighbor = self._connected()
        self._take_back(neighbor)
        number, descriptors = self._buffer_for(rows.shape[0])
        try:
            self._made[number][: rows.shape[0]].copy_(rows)
            socket.send_fds(neighbor, [_NEWS.pack(tag, rows.shape[0], number)], descriptors)
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
        """Frees the buffers that the neighbor has given back. Raises ConnectionError when it is
        gone."""
        with contextlib.suppress(BlockingIOError):
            while returned := neighbor.recv(_RETURN.size, socket.MSG_DONTWAIT):
                self._free.append(*_RETURN.unpack(returned))
            raise ConnectionError("the other end has closed the link")

    def _buffer_for(self, num_rows: int) -> tuple[int, list[int]]:
        """The number of a free buffer, and its descriptor if the neighbor has never seen it."""
        for number in self._free:
            if self._made[number].shape[0] >= num_rows:
                self._free.remove(number)
                return number, []
        capacity = max(_FEWEST_ROWS, 1 << (num_rows - 1).bit_length())
        buffer, descriptor = self._buffers.make(capacity)
        self._made.append(buffer)
        return len(self._made) - 1, [descriptor]


class Inbox:
    """The downstream end."""

    def __init__(self, path: str, buffers: Buffers) -> None:
        self._path = path
        self._buffers = buffers
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(1)
        self._socket: socket.socket | None = None
        self._opened: dict[int, torch.Tensor] = {}
        self._in_use: int | None = None

    def take(self) -> tuple[int, torch.Tensor] | None:
        """The next tag and its rows, waited for; None when the other end is gone. The rows are
        valid until the next call."""
        if self._socket is None:
            self._socket, _ = self._listener.accept()
        self._give_back(self._socket)
        try:
            news, descriptors, *_ = socket.recv_fds(self._socket, _NEWS.size, 1)
        except ConnectionError:
            return None
        if not news:
            return None
        tag, num_rows, number = _NEWS.unpack(news)
        if number not in self._opened:
            (descriptor,) = descriptors
            self._opened[number] = self._buffers.open(descriptor)
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
        """Waits up to `timeout_s`; True if the other end has sent something or is gone."""
        if self._socket is None:
            if not _is_readable(self._listener, timeout_s):
                return False
            self._socket, _ = self._listener.accept()
        return _is_readable(self._socket, timeout_s)

    def _give_back(self, neighbor: socket.socket) -> None:
        """All readers of the last step's rows have run or were launched."""
        if self._in_use is None:
            return
        with contextlib.suppress(ConnectionError):
            neighbor.send(_RETURN.pack(self._in_use))
        self._in_use = None


def _is_readable(end: socket.socket, timeout_s: float) -> bool:
    readable, _, _ = select.select([end], [], [], timeout_s)
    return bool(readable)
