"""The activation link between stages that each have a GPU of their own: torch.distributed.

Opened by `open_link.py`. Point-to-point sends and receives in step order, over NCCL (gloo in
tests). Untested on hardware with NCCL.
"""

from collections import deque
from datetime import timedelta

import torch
import torch.distributed

from sgl_pipeline.pp_runner.links.activation_link import ActivationShape


class DistributedLink:
    """Rows through torch.distributed, rank = stage. The rendezvous is a file, never a port.

    torch.distributed is process-global, so a process holds one of these.
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
        shape = self._shape
        hidden = torch.empty(num_rows, shape.hidden_size, dtype=shape.dtype, device=shape.device)
        torch.distributed.recv(hidden, self._stage - 1)
        return hidden

    def has_rows(self) -> bool:
        """On a GPU to receive is to launch; with gloo, which only tests use, it waits."""
        return True

    def close(self) -> None:
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        torch.distributed.destroy_process_group()
