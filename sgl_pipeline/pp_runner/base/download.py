"""Brings a step's results from the stage's device to the host.

On a CPU there is nothing to copy; for a GPU see `cuda/output_staging.py`.
"""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


class HostCopy(Protocol):
    """Tensors on their way to the host."""

    def is_ready(self) -> bool:
        """True if the tensors have arrived."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the host; waits for them."""


class Download(Protocol):
    """Brings tensors to the host while the device goes on with the next step."""

    def __call__(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """Starts the copy, behind all that computes `tensors`."""

    def beside_kernels(self, *read: torch.Tensor) -> AbstractContextManager[None]:
        """Device work inside does not wait for steps that were launched since the last call; it may
        read `read`, which that call came after."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """A `HostCopy` that is ready at once."""

    on_host: tuple[torch.Tensor, ...]

    def is_ready(self) -> bool:
        return True

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.on_host


class NoDownload:
    """The `Download` of a CPU, where tensors are on the host already."""

    def __call__(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        return Arrived(tuple(tensors))

    def beside_kernels(self, *read: torch.Tensor) -> AbstractContextManager[None]:
        return contextlib.nullcontext()
