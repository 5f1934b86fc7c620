"""The interface of activation links for the stage runner.

There is `host_link` (one host: CPU stages, and several stages on one GPU) on `buffered_link`, and
`distributed_link` (a GPU for each stage); `open_link.py` chooses. The stage runner receives a
step's rows from upstream before it runs its layers and sends the result downstream. A link carries
exactly the [T, hidden] tensor that would go from layer to layer inside a stage.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class ActivationShape:
    """The shape of one row of the residual stream."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self.dtype.itemsize


class NeighborGone(Exception):
    """The stage upstream has closed its end of the link: it has ended, or drops its step."""


class ActivationLink(Protocol):
    """One stage's connection to its two neighbors."""

    def send(self, step_id: int, hidden: torch.Tensor) -> None:
        """Hands `hidden` [T, hidden] to the downstream stage without waiting for it."""

    def has_room(self) -> bool:
        """True if the downstream stage has read most of the rows. The number of steps is limited,
        so steps need not ask."""

    def receive(self, step_id: int, num_rows: int) -> torch.Tensor:
        """Waits for the [num_rows, hidden] tensor of `step_id` from the upstream stage.

        It must not be written to, and is valid until the next `receive`. A HostLink raises
        ProtocolError when another step's rows arrive, or another number of them; a DistributedLink
        sends rows alone and trusts their order. Raises NeighborGone if that is known.
        """

    def has_rows(self) -> bool:
        """True if the next step's rows are there, or will be without the host waiting for them."""

    @property
    def descriptor(self) -> int | None:
        """A file descriptor that can be read when `has_rows` may have come true; None if `receive`
        must be called without looking."""

    def close(self) -> None:
        """Closes the link; steps that are in flight are lost."""
