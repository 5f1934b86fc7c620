"""The activation link between stages that each have a GPU of their own: torch.distributed.

Point-to-point sends and receives in step order, over NCCL (gloo in tests). Each boundary is a
process group of its two stages: within one group NCCL runs all sends and receives on one stream,
where a stage's next rows would wait until its neighbor has taken the last. Untested on hardware
with NCCL.
"""

import socket
from collections import deque
from datetime import timedelta

import torch
import torch.distributed

from sgl_pipeline.cluster.doors import split_address
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape

TCP_RENDEZVOUS = "tcp://"


class DistributedLink:
    """Rows through torch.distributed, rank = stage.

    torch.distributed is process-global, so a process holds one of these.

    Args:
        rendezvous: a path of a file that all stages can open, or where they have several hosts
            `tcp://HOST:PORT`, an address of stage 0's host, which listens there and nowhere else.

    Raises ConfigurationError when stage 0 cannot listen there.
    """

    def __init__(
        self,
        shape: ActivationShape,
        backend: str,
        rendezvous: str,
        stage: int,
        num_stages: int,
        timeout_s: float = 600.0,
    ) -> None:
        timeout = timedelta(seconds=timeout_s)
        torch.distributed.init_process_group(
            backend,
            store=_open_store(rendezvous, stage, num_stages, timeout),
            rank=stage,
            world_size=num_stages,
            timeout=timeout,
            device_id=shape.device if backend == "nccl" else None,
        )
        # Every process makes every group, in the same order, its own or not.
        groups = [
            torch.distributed.new_group([boundary, boundary + 1], timeout=timeout)
            for boundary in range(num_stages - 1)
        ]
        self._upstream = groups[stage - 1] if stage > 0 else None
        self._downstream = groups[stage] if stage < num_stages - 1 else None
        self._shape = shape
        self._stage = stage
        # The sender keeps the buffer until the send has completed.
        self._sending: deque[tuple[torch.distributed.Work, torch.Tensor]] = deque()

    def send(self, step_id: int, hidden: torch.Tensor) -> None:
        assert self._downstream is not None, "the last stage sends to no other"
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        rows = hidden.contiguous()
        work = torch.distributed.isend(rows, self._stage + 1, group=self._downstream)
        assert work is not None, "this rank is part of its boundaries' groups"
        self._sending.append((work, rows))

    def has_room(self) -> bool:
        return True

    def receive(self, step_id: int, num_rows: int) -> torch.Tensor:
        assert self._upstream is not None, "the first stage receives from no other"
        shape = self._shape
        hidden = torch.empty(num_rows, shape.hidden_size, dtype=shape.dtype, device=shape.device)
        torch.distributed.recv(hidden, self._stage - 1, group=self._upstream)
        return hidden

    def has_rows(self) -> bool:
        """On a GPU receiving is a launch; with gloo, which only tests use, it waits."""
        return True

    @property
    def descriptor(self) -> int | None:
        return None

    def close(self) -> None:
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        torch.distributed.destroy_process_group()


def _open_store(
    rendezvous: str, stage: int, num_stages: int, timeout: timedelta
) -> torch.distributed.Store:
    """The store through which the stages exchange their addresses, and nothing else."""
    if not rendezvous.startswith(TCP_RENDEZVOUS):
        return torch.distributed.FileStore(rendezvous, num_stages)
    host, port = split_address(rendezvous.removeprefix(TCP_RENDEZVOUS))
    is_server = stage == 0
    return torch.distributed.TCPStore(
        host,
        port,
        num_stages,
        is_server,
        timeout,
        # Left to itself, the store listens on every interface.
        master_listen_fd=_listen(host, port) if is_server else None,
    )


def _listen(host: str, port: int) -> int:
    """The descriptor of a socket that listens at that address alone; the caller owns it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family).detach()
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen at {host} port {port}, the one after that of --dist-init-addr, where "
            f"stages with GPUs meet: {error.strerror}; choose another --dist-init-addr, or use "
            "--stage-link host"
        ) from error
