"""Carries the residual stream from one stage to the next.

The stage worker receives a step's rows from upstream before it runs its layers and sends the result
downstream; a send never waits for the peer. `HostLink` moves rows through host memory over a local
ZeroMQ socket (CPU stages, and several stages on one GPU); `DistributedLink` uses torch.distributed
point-to-point (NCCL between GPUs, gloo in tests). What crosses is exactly the [T, hidden] tensor
that would go from layer to layer inside a stage.
"""

import struct
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed
import zmq

from sgl_pipeline.errors import ProtocolError

_STEP_ID = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class ActivationShape:
    """What one row of the residual stream is."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, num_rows: int, device: torch.device | None = None) -> torch.Tensor:
        return torch.empty(
            num_rows, self.hidden_size, dtype=self.dtype, device=device or self.device
        )


class ActivationLink(Protocol):
    """One stage's door to its two neighbours."""

    def send(self, step_id: int, hidden: torch.Tensor) -> None:
        """Hands `hidden` [T, hidden] to the downstream stage without waiting for it."""

    def receive(self, step_id: int, num_rows: int) -> torch.Tensor:
        """Waits for the [num_rows, hidden] tensor of `step_id` from the upstream stage.

        A HostLink raises ProtocolError when another step's rows arrive, or another number of them;
        a DistributedLink sends rows alone and trusts their order.
        """

    def close(self) -> None:
        """Closes the link; what was sent is still delivered for a moment."""


class HostLink:
    """Rows through host memory, over `ipc://` sockets in the server's private run directory.

    The downstream end binds. ZeroMQ keeps a reference to the sent buffer until it is through, so
    the sender must not write to it again; every forward pass makes a new one.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        shape: ActivationShape,
        upstream: str | None,
        downstream: str | None,
    ) -> None:
        self._shape = shape
        self._upstream = self._open(context, zmq.PULL)
        self._downstream = self._open(context, zmq.PUSH)
        if upstream is not None:
            self._upstream.bind(upstream)
        if downstream is not None:
            self._downstream.connect(downstream)

    def send(self, step_id: int, hidden: torch.Tensor) -> None:
        rows = hidden.contiguous().cpu().view(torch.uint8).numpy()
        self._downstream.send_multipart([_STEP_ID.pack(step_id), rows.data], copy=False)

    def receive(self, step_id: int, num_rows: int) -> torch.Tensor:
        header, rows = self._upstream.recv_multipart(copy=False)
        (sent_step_id,) = _STEP_ID.unpack(header.buffer)
        hidden = self._shape.empty(num_rows, torch.device("cpu"))
        target = hidden.view(torch.uint8).numpy().reshape(-1)
        source = np.frombuffer(rows.buffer, np.uint8)
        if sent_step_id != step_id or source.size != target.size:
            raise ProtocolError(
                f"expected {target.size} bytes of activations of step {step_id}, "
                f"received {source.size} bytes of step {sent_step_id}"
            )
        target[:] = source
        return hidden.to(self._shape.device, non_blocking=True)

    def close(self) -> None:
        self._upstream.close(linger=0)
        self._downstream.close(linger=500)

    @staticmethod
    def _open(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        return socket


class DistributedLink:
    """Rows through torch.distributed, rank = stage. The rendezvous is a file, never a port.

    Untested on hardware with NCCL; tested with gloo. torch.distributed is process-global, so a
    process holds one of these.
    """

    def __init__(
        self,
        shape: ActivationShape,
        backend: str,
        rendezvous_path: str,
        stage: int,
        num_stages: int,
        timeout_s: float = 600.0,
    ) -> None:
        torch.distributed.init_process_group(
            backend,
            store=torch.distributed.FileStore(rendezvous_path, num_stages),
            rank=stage,
            world_size=num_stages,
            timeout=timedelta(seconds=timeout_s),
            device_id=shape.device if backend == "nccl" else None,
        )
        self._shape = shape
        self._stage = stage
        # Whoever sends keeps the buffer until the send has completed.
        self._sending: deque[tuple[torch.distributed.Work, torch.Tensor]] = deque()

    def send(self, step_id: int, hidden: torch.Tensor) -> None:
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        rows = hidden.contiguous()
        work = torch.distributed.isend(rows, self._stage + 1)
        assert work is not None, "this rank is part of the default group"
        self._sending.append((work, rows))

    def receive(self, step_id: int, num_rows: int) -> torch.Tensor:
        hidden = self._shape.empty(num_rows)
        torch.distributed.recv(hidden, self._stage - 1)
        return hidden

    def close(self) -> None:
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        torch.distributed.destroy_process_group()


def open_activation_link(
    context: zmq.Context[zmq.Socket[bytes]],
    shape: ActivationShape,
    links: tuple[str, ...],
    stage: int,
) -> ActivationLink:
    """The link of `stage`, given the addresses of `StageAssignment.links`.

    `ipc://` addresses make a HostLink; a single `nccl:PATH` or `gloo:PATH` for all boundaries makes
    a DistributedLink with its rendezvous at PATH.
    """
    if links and links[0].partition(":")[0] in ("nccl", "gloo"):
        backend, _, path = links[0].partition(":")
        return DistributedLink(shape, backend, path, stage, len(links) + 1)
    upstream = links[stage - 1] if stage > 0 else None
    downstream = links[stage] if stage < len(links) else None
    return HostLink(context, shape, upstream, downstream)
