"""The activation link between stage processes that share a GPU: rows stay in its memory.

Opened by `open_link.py`. The stage upstream copies a step's rows on a stream of its own. Neither
process waits for the GPU: what orders the copies and the kernels are events that both have open,
as they have the buffers. The protocol is tested with the host's memory in place of the GPU's;
untested on hardware.
"""

import contextlib
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from sgl_pipeline.pp_runner.cuda.device_memory import (
    HANDLE_BYTES,
    CudaMemory,
    DeviceMemory,
    SharedEvent,
)
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.links.buffered_link import BufferedLink

# Bytes of a buffer, handles of its memory and of its written event.
_INTRODUCTION = struct.Struct(f"<q{HANDLE_BYTES}s{HANDLE_BYTES}s")

# Where copies to downstream are launched: inside it, kernels go to another stream.
OwnStream = Callable[[torch.Tensor], AbstractContextManager[None]]


@dataclass(slots=True, eq=False)
class SharedRows:
    """Room for some rows on the GPU, which two processes have open.

    `written` is recorded upstream, `read` downstream; upstream knows the latter when the buffer has
    come back once.
    """

    rows: torch.Tensor  # [capacity, hidden]
    memory_handle: bytes
    written: SharedEvent
    read: SharedEvent | None = None


class CudaIpcLink(BufferedLink[SharedRows]):
    """A buffer is read where it lies, by what is launched before the next `receive`."""

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
        super().__init__(upstream, downstream, _CudaBuffers(shape, memory, own_stream))


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


class _CudaBuffers:
    """The `Buffers` of a CudaIpcLink."""

    news_bytes = _INTRODUCTION.size
    return_bytes = HANDLE_BYTES  # of the read event

    def __init__(self, shape: ActivationShape, memory: DeviceMemory, own_stream: OwnStream) -> None:
        self._shape = shape
        self._memory = memory
        self._own_stream = own_stream

    def make(self, num_rows: int) -> SharedRows:
        region = self._memory.allocate(num_rows * self._shape.row_bytes)
        return SharedRows(self._as_rows(region.data), region.handle, self._memory.new_event())

    def capacity(self, buffer: SharedRows) -> int:
        return buffer.rows.shape[0]

    def write(self, buffer: SharedRows, hidden: torch.Tensor) -> None:
        with self._own_stream(hidden):
            if buffer.read is not None:
                buffer.read.wait()
            buffer.rows[: hidden.shape[0]].copy_(hidden)
            buffer.written.record()

    def introduce(self, buffer: SharedRows, first_time: bool) -> tuple[bytes, list[int]]:
        handles = buffer.memory_handle, buffer.written.handle()
        return _INTRODUCTION.pack(buffer.rows.nbytes, *handles), []

    def came_back(self, buffer: SharedRows, data: bytes) -> None:
        buffer.read = buffer.read or self._memory.open_event(data)

    def open(self, data: bytes, descriptors: list[int]) -> SharedRows:
        num_bytes, memory_handle, event_handle = _INTRODUCTION.unpack(data)
        return SharedRows(
            self._as_rows(self._memory.open(memory_handle, num_bytes)),
            memory_handle,
            written=self._memory.open_event(event_handle),
            read=self._memory.new_event(),
        )

    def read(self, buffer: SharedRows, num_rows: int) -> torch.Tensor:
        buffer.written.wait()
        return buffer.rows[:num_rows]

    def after_reading(self, buffer: SharedRows) -> bytes:
        assert buffer.read is not None, "downstream makes it with the buffer"
        buffer.read.record()
        return buffer.read.handle()

    def _as_rows(self, data: torch.Tensor) -> torch.Tensor:
        return data.view(self._shape.dtype).view(-1, self._shape.hidden_size)
