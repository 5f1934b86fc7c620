"""The activation link between stages of one host: rows in shared memory, news through a socket.

Opened by `open_link.py`, for CPU stages and for several stages on one GPU. The stage upstream
copies a step's rows into a buffer that both processes map and tells its number; the stage
downstream computes on them where they lie and gives the buffer back when it asks for the next
step's. Both are system calls of the stage's own thread: a thread between the two would have to wait
for its turn where all cores compute. A buffer is anonymous memory whose file descriptor goes
through the socket once, so nothing of it outlives the processes.
"""

import contextlib
import mmap
import os
import signal
import socket
import struct
from dataclasses import dataclass
from typing import NoReturn

import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape

_NEWS = struct.Struct("<qqq")  # step id, number of the buffer, rows
_RETURN = struct.Struct("<q")  # number of the buffer
_FEWEST_ROWS = 64  # of a buffer; all hold a power of two, so that steps share them


class HostLink:
    """Rows of the residual stream over a Unix socket in the server's private run directory.

    The downstream end listens, and the upstream end connects with its first rows. A neighbour that
    is gone is the launcher's to notice: what is sent to it is dropped, and who waits for it waits.
    """

    def __init__(
        self, shape: ActivationShape, upstream: str | None, downstream: str | None
    ) -> None:
        self._inbox = _Inbox(shape, upstream) if upstream is not None else None
        self._outbox = _Outbox(shape, downstream) if downstream is not None else None

    def send(self, step_id: int, hidden: torch.Tensor) -> None:
        assert self._outbox is not None, "the last stage has nobody to send to"
        self._outbox.send(step_id, hidden)

    def receive(self, step_id: int, num_rows: int) -> torch.Tensor:
        """The rows are to be read only, and only until the next `receive`."""
        assert self._inbox is not None, "the first stage has nobody to receive from"
        return self._inbox.receive(step_id, num_rows)

    def close(self) -> None:
        for end in (self._inbox, self._outbox):
            if end is not None:
                end.close()


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Room for some rows, which two processes see. `rows` is [capacity, hidden], on the host."""

    number: int
    rows: torch.Tensor

    @classmethod
    def map(cls, number: int, descriptor: int, shape: ActivationShape) -> "_Buffer":
        memory = mmap.mmap(descriptor, 0)
        return cls(number, torch.frombuffer(memory, dtype=shape.dtype).view(-1, shape.hidden_size))


class _Outbox:
    """The upstream end: owns the buffers."""

    def __init__(self, shape: ActivationShape, path: str) -> None:
        self._shape = shape
        self._path = path
        self._socket: socket.socket | None = None
        self._free: list[_Buffer] = []
        self._sent: dict[int, _Buffer] = {}
        self._num_buffers = 0

    def send(self, step_id: int, hidden: torch.Tensor) -> None:
        num_rows = hidden.shape[0]
        with contextlib.suppress(ConnectionError):
            neighbour = self._connected()
            self._take_back(neighbour)
            buffer, descriptors = self._buffer_for(num_rows)
            buffer.rows[:num_rows].copy_(hidden)
            self._sent[buffer.number] = buffer
            try:
                news = _NEWS.pack(step_id, buffer.number, num_rows)
                socket.send_fds(neighbour, [news], descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.connect(self._path)
        return self._socket

    def _take_back(self, neighbour: socket.socket) -> None:
        """Frees the buffers that the neighbour has done with."""
        with contextlib.suppress(BlockingIOError):
            while returned := neighbour.recv(_RETURN.size, socket.MSG_DONTWAIT):
                self._free.append(self._sent.pop(*_RETURN.unpack(returned)))

    def _buffer_for(self, num_rows: int) -> tuple[_Buffer, list[int]]:
        """A free buffer, and the descriptor that the neighbour needs where it is a new one."""
        for buffer in self._free:
            if buffer.rows.shape[0] >= num_rows:
                self._free.remove(buffer)
                return buffer, []
        capacity = max(_FEWEST_ROWS, 1 << (num_rows - 1).bit_length())
        descriptor = os.memfd_create("activations")
        os.ftruncate(descriptor, capacity * self._shape.row_bytes)
        self._num_buffers += 1
        return _Buffer.map(self._num_buffers, descriptor, self._shape), [descriptor]


class _Inbox:
    """The downstream end."""

    def __init__(self, shape: ActivationShape, path: str) -> None:
        self._shape = shape
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(1)
        self._socket: socket.socket | None = None
        self._buffers: dict[int, _Buffer] = {}
        self._in_use: int | None = None

    def receive(self, step_id: int, num_rows: int) -> torch.Tensor:
        if self._socket is None:
            self._socket, _ = self._listener.accept()
        self._give_back()
        news, descriptors, *_ = socket.recv_fds(self._socket, _NEWS.size, 1)
        if not news:
            wait_for_the_end()
        sent_step_id, number, sent_rows = _NEWS.unpack(news)
        for descriptor in descriptors:
            self._buffers[number] = _Buffer.map(number, descriptor, self._shape)
            os.close(descriptor)
        if (sent_step_id, sent_rows) != (step_id, num_rows):
            raise ProtocolError(
                f"expected {num_rows} rows of activations of step {step_id}, "
                f"received {sent_rows} rows of step {sent_step_id}"
            )
        self._in_use = number
        return self._buffers[number].rows[:num_rows].to(self._shape.device)

    def close(self) -> None:
        self._listener.close()
        if self._socket is not None:
            self._socket.close()

    def _give_back(self) -> None:
        """The last step's rows have been computed on."""
        if self._in_use is None:
            return
        assert self._socket is not None
        with contextlib.suppress(ConnectionError):
            self._socket.send(_RETURN.pack(self._in_use))
        self._in_use = None


def wait_for_the_end() -> NoReturn:
    """For a stage whose neighbour is gone: to fail as well would hide who was the first to."""
    while True:
        signal.pause()
