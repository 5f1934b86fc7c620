"""The activation link between stage processes that share a GPU: rows stay in its memory.

Opened by `open_link.py`. The stage upstream copies a step's rows into a buffer that both processes
have open, on a stream of its own, and tells its number through a Unix socket; the stage downstream
computes on them where they lie. Neither process waits for the GPU: what orders the copies and the
kernels are events that both have open too. What crosses the socket are fixed structs of numbers and
handles. The protocol is tested with the host's memory in place of the GPU's; untested on hardware.
"""

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.cuda.device_memory import (
    HANDLE_BYTES,
    CudaMemory,
    DeviceMemory,
    SharedEvent,
)
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.links.host_link import wait_for_the_end

# Step id, rows, number of the buffer, its bytes, handles of its memory and of its written event.
_NEWS = struct.Struct(f"<qqqq{HANDLE_BYTES}s{HANDLE_BYTES}s")
_RETURN = struct.Struct(f"<q{HANDLE_BYTES}s")  # number of the buffer, handle of its read event
_FEWEST_ROWS = 64  # of a buffer; all hold a power of two, so that steps share them

# Where copies to downstream are launched: inside it, kernels go to another stream.
OwnStream = Callable[[torch.Tensor], AbstractContextManager[None]]


class CudaIpcLink:
    """Rows of the residual stream in buffers on the GPU.

    The downstream end listens, and the upstream end connects with its first rows. A neighbour that
    is gone is the launcher's to notice, as with a `HostLink`.
    """

    def __init__(
        self,
        shape: ActivationShape,
        upstream: str | None,
        downstream: str | None,
        memory: DeviceMemory | None = None,
        own_stream: OwnStream | None = None,
    ) -> None:
        memory = memory or CudaMemory(shape.device)
        own_stream = own_stream or CopyStream(shape.device)
        self._inbox = _Inbox(shape, upstream, memory) if upstream is not None else None
        self._outbox = None
        if downstream is not None:
            self._outbox = _Outbox(shape, downstream, memory, own_stream)

    def send(self, step_id: int, hidden: torch.Tensor) -> None:
        assert self._outbox is not None, "the last stage has nobody to send to"
        self._outbox.send(step_id, hidden)

    def receive(self, step_id: int, num_rows: int) -> torch.Tensor:
        """The rows are to be read only, by what is launched before the next `receive`."""
        assert self._inbox is not None, "the first stage has nobody to receive from"
        return self._inbox.receive(step_id, num_rows)

    def close(self) -> None:
        for end in (self._inbox, self._outbox):
            if end is not None:
                end.close()


class CopyStream:
    """A stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def __call__(self, source: torch.Tensor) -> Iterator[None]:
        """Inside, kernels go to this stream, after what computes `source`, which stays in memory
        until they have read it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
        source.record_stream(self._stream)


@dataclass(slots=True, eq=False)
class _Buffer:
    """Room for some rows, which two processes have open.

    `written` is recorded upstream, `read` downstream; upstream knows the latter when the buffer has
    come back once.
    """

    number: int
    rows: torch.Tensor  # [capacity, hidden]
    memory_handle: bytes
    written: SharedEvent
    read: SharedEvent | None = None


class _Outbox:
    """The upstream end: owns the buffers."""

    def __init__(
        self, shape: ActivationShape, path: str, memory: DeviceMemory, own_stream: OwnStream
    ) -> None:
        self._shape = shape
        self._path = path
        self._memory = memory
        self._own_stream = own_stream
        self._socket: socket.socket | None = None
        self._free: list[_Buffer] = []
        self._sent: dict[int, _Buffer] = {}
        self._num_buffers = 0

    def send(self, step_id: int, hidden: torch.Tensor) -> None:
        num_rows = hidden.shape[0]
        with contextlib.suppress(ConnectionError):
            neighbour = self._connected()
            self._take_back(neighbour)
            buffer = self._buffer_for(num_rows)
            with self._own_stream(hidden):
                if buffer.read is not None:
                    buffer.read.wait()
                buffer.rows[:num_rows].copy_(hidden)
                buffer.written.record()
            self._sent[buffer.number] = buffer
            neighbour.send(
                _NEWS.pack(
                    step_id,
                    num_rows,
                    buffer.number,
                    buffer.rows.nbytes,
                    buffer.memory_handle,
                    buffer.written.handle(),
                )
            )

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.connect(self._path)
        return self._socket

    def _take_back(self, neighbour: socket.socket) -> None:
        """Frees the buffers that the neighbour has launched its last reading of."""
        with contextlib.suppress(BlockingIOError):
            while returned := neighbour.recv(_RETURN.size, socket.MSG_DONTWAIT):
                number, handle = _RETURN.unpack(returned)
                buffer = self._sent.pop(number)
                buffer.read = buffer.read or self._memory.open_event(handle)
                self._free.append(buffer)

    def _buffer_for(self, num_rows: int) -> _Buffer:
        for buffer in self._free:
            if buffer.rows.shape[0] >= num_rows:
                self._free.remove(buffer)
                return buffer
        capacity = max(_FEWEST_ROWS, 1 << (num_rows - 1).bit_length())
        region = self._memory.allocate(capacity * self._shape.row_bytes)
        self._num_buffers += 1
        rows = region.data.view(self._shape.dtype).view(capacity, self._shape.hidden_size)
        return _Buffer(self._num_buffers, rows, region.handle, self._memory.new_event())


class _Inbox:
    """The downstream end."""

    def __init__(self, shape: ActivationShape, path: str, memory: DeviceMemory) -> None:
        self._shape = shape
        self._memory = memory
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(1)
        self._socket: socket.socket | None = None
        self._buffers: dict[int, _Buffer] = {}
        self._in_use: _Buffer | None = None

    def receive(self, step_id: int, num_rows: int) -> torch.Tensor:
        if self._socket is None:
            self._socket, _ = self._listener.accept()
        self._give_back(self._socket)
        news = self._socket.recv(_NEWS.size)
        if not news:
            wait_for_the_end()
        sent_step_id, sent_rows, number, num_bytes, memory_handle, event_handle = _NEWS.unpack(news)
        if (sent_step_id, sent_rows) != (step_id, num_rows):
            raise ProtocolError(
                f"expected {num_rows} rows of activations of step {step_id}, "
                f"received {sent_rows} rows of step {sent_step_id}"
            )
        if number not in self._buffers:
            rows = self._memory.open(memory_handle, num_bytes).view(self._shape.dtype)
            self._buffers[number] = _Buffer(
                number,
                rows.view(-1, self._shape.hidden_size),
                memory_handle,
                self._memory.open_event(event_handle),
                self._memory.new_event(),
            )
        self._in_use = self._buffers[number]
        self._in_use.written.wait()
        return self._in_use.rows[:num_rows]

    def close(self) -> None:
        self._listener.close()
        if self._socket is not None:
            self._socket.close()

    def _give_back(self, neighbour: socket.socket) -> None:
        """All that reads the last step's rows has been launched."""
        if self._in_use is None:
            return
        read = self._in_use.read
        assert read is not None, "downstream makes it with the buffer"
        read.record()
        with contextlib.suppress(ConnectionError):
            neighbour.send(_RETURN.pack(self._in_use.number, read.handle()))
        self._in_use = None
