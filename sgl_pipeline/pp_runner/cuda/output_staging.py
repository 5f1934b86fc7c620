"""Brings a step's results from the GPU to the host, beside the kernels of the next step.

For the last stage. It must never let a tensor's memory be used again before the copy has read it,
nor page-locked memory before the host has: torch's two allocators ensure that, one for each stream
that a tensor is recorded on, the other for each copy. It and the tests of its order have run
on an H200.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sgl_pipeline.pp_runner.base.download import HostCopy


@dataclass(frozen=True, slots=True, eq=False)
class _OnTheWay:
    """A copy into page-locked memory, which `copied` marks the end of."""

    on_host: tuple[torch.Tensor, ...]
    copied: torch.cuda.Event

    def is_ready(self) -> bool:
        done: bool = self.copied.query()
        return done

    def tensors(self) -> tuple[torch.Tensor, ...]:
        self.copied.synchronize()
        return self.on_host


class DownloadBesideKernels:
    """A `Download` on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event(blocking=True)
        with self.beside_kernels(*tensors):
            on_host = tuple(
                torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors
            )
            for locked, tensor in zip(on_host, tensors, strict=True):
                locked.copy_(tensor, non_blocking=True)
            copied.record()
        return _OnTheWay(on_host, copied)

    @contextlib.contextmanager
    def beside_kernels(self, *read: torch.Tensor) -> Iterator[None]:
        """See `Download.beside_kernels`."""
        with torch.cuda.stream(self._stream):
            yield
        for tensor in read:
            tensor.record_stream(self._stream)
