"""The activation link between stages of one host: buffers in shared memory.

Opened by `open_link.py`, for CPU stages and for several stages on one GPU. To copy and to tell are
system calls of the stage's own thread: a thread between the two would have to wait for its turn
where all cores compute. A buffer is anonymous memory whose file descriptor goes through the socket
once, so nothing of it outlives the processes.
"""

import mmap
import os

import torch

from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.links.buffered_link import BufferedLink


class HostLink(BufferedLink[torch.Tensor]):
    """A buffer is [capacity, hidden] on the host, which two processes see."""

    def __init__(
        self, shape: ActivationShape, upstream: str | None, downstream: str | None
    ) -> None:
        super().__init__(upstream, downstream, SharedMemory(shape))


class SharedMemory:
    """The `Buffers` of a HostLink."""

    news_bytes = 0
    return_bytes = 0

    def __init__(self, shape: ActivationShape) -> None:
        self._shape = shape
        self._new_descriptor: int | None = None  # of the latest buffer, until it is sent

    def make(self, num_rows: int) -> torch.Tensor:
        descriptor = os.memfd_create("activations")
        os.ftruncate(descriptor, num_rows * self._shape.row_bytes)
        self._new_descriptor = descriptor
        return self._map(descriptor)

    def capacity(self, buffer: torch.Tensor) -> int:
        return buffer.shape[0]

    def write(self, buffer: torch.Tensor, hidden: torch.Tensor) -> None:
        buffer[: hidden.shape[0]].copy_(hidden)

    def introduce(self, buffer: torch.Tensor, first_time: bool) -> tuple[bytes, list[int]]:
        if not first_time:
            return b"", []
        assert self._new_descriptor is not None
        descriptor, self._new_descriptor = self._new_descriptor, None
        return b"", [descriptor]

    def came_back(self, buffer: torch.Tensor, data: bytes) -> None:
        """What was read is read."""

    def open(self, data: bytes, descriptors: list[int]) -> torch.Tensor:
        (descriptor,) = descriptors
        try:
            return self._map(descriptor)
        finally:
            os.close(descriptor)

    def read(self, buffer: torch.Tensor, num_rows: int) -> torch.Tensor:
        return buffer[:num_rows].to(self._shape.device)

    def after_reading(self, buffer: torch.Tensor) -> bytes:
        return b""

    def _map(self, descriptor: int) -> torch.Tensor:
        memory = mmap.mmap(descriptor, 0)
        return torch.frombuffer(memory, dtype=self._shape.dtype).view(-1, self._shape.hidden_size)
