"""The activation link between stages of one host: buffers in shared memory.

For CPU stages and for several stages on one GPU. Copying and announcing are system calls of the
stage's own thread: a thread between the two would have to wait for its turn where all cores
compute. A buffer is anonymous memory whose file descriptor goes through the socket once, so nothing
of it outlives the processes.
"""

import mmap
import os

import torch

from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.links.buffered_link import BufferedLink


class HostLink(BufferedLink):
    """A buffer is [capacity, hidden] on the host, which two processes see."""

    def __init__(
        self, shape: ActivationShape, upstream: str | None, downstream: str | None
    ) -> None:
        super().__init__(upstream, downstream, SharedMemory(shape))


class SharedMemory:
    """The `Buffers` of a HostLink."""

    def __init__(self, shape: ActivationShape) -> None:
        self._shape = shape

    def make(self, num_rows: int) -> tuple[torch.Tensor, int]:
        descriptor = os.memfd_create("activations")
        os.ftruncate(descriptor, num_rows * self._shape.row_bytes)
        return self._map(descriptor), descriptor

    def open(self, descriptor: int) -> torch.Tensor:
        try:
            return self._map(descriptor)
        finally:
            os.close(descriptor)

    def read(self, buffer: torch.Tensor, num_rows: int) -> torch.Tensor:
        return buffer[:num_rows].to(self._shape.device)

    def _map(self, descriptor: int) -> torch.Tensor:
        memory = mmap.mmap(descriptor, 0)
        return torch.frombuffer(memory, dtype=self._shape.dtype).view(-1, self._shape.hidden_size)
