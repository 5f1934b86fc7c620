"""The messages between a host's agent and the head, and between the head and its scheduler.

The agent greets with `HostHello` and gets `Welcome` or `Rejected`. Then the head asks for workers
and pings; the agent answers, and says which workers have ended, and when its host is to go.
Frozen, tagged structs.
"""

import msgspec


class HostHello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A host offers to run workers. `address` is its cluster port, where the others reach it;
    `interface` the network interface of that. `model_digest` is that of `model_digest.py`."""

    rank: int
    num_hosts: int
    name: str
    address: str
    interface: str
    cores: tuple[int, ...]
    num_numa_nodes: int
    num_gpus: int
    memory_bytes: int
    version: str
    model_digest: str

    @property
    def title(self) -> str:
        """The host's name in messages to people."""
        return f"host {self.rank} ({self.name}, {self.address})"


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The host is part of the cluster. `silence_s` is how long either end may be silent."""

    silence_s: float


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The host cannot be part of it; `reason` says what to do. `is_final`: nor can it later."""

    reason: str
    is_final: bool = True


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered at once. `sent_s` is a moment of the head's clock."""

    sent_s: float


class Pong(msgspec.Struct, frozen=True, tag=True):
    """`received_s` and `answered_s` are moments of the host's clock."""

    sent_s: float
    received_s: float
    answered_s: float


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """Start a process that greets the scheduler as `worker`, with `num_threads` for compute."""

    worker: int
    num_threads: int


class StopWorker(msgspec.Struct, frozen=True, tag=True):
    """End a worker's process, if it is there."""

    worker: int


class DumpWorker(msgspec.Struct, frozen=True, tag=True):
    """Have a worker write the stacks of its threads into its host's log."""

    worker: int


class WorkerStarted(msgspec.Struct, frozen=True, tag=True):
    worker: int
    pid: int


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    worker: int
    reason: str


class HostLeaves(msgspec.Struct, frozen=True, tag=True):
    """The host was asked to go. It stays until none of its workers is left."""


class AgentExit(msgspec.Struct, frozen=True, tag=True):
    """The server ends for good: so do the agents."""

    reason: str


ToAgent = Welcome | Rejected | Ping | StartWorker | StopWorker | DumpWorker | AgentExit
FromAgent = HostHello | Pong | WorkerStarted | WorkerEnded | HostLeaves


class HostJoined(msgspec.Struct, frozen=True, tag=True):
    """From the head to its scheduler: a host is there."""

    hello: HostHello


class HostLost(msgspec.Struct, frozen=True, tag=True):
    """Its workers are as good as dead, and will be when it returns."""

    rank: int
    reason: str


class OfHost(msgspec.Struct, frozen=True, tag=True):
    """An agent's message about a worker, or about its host."""

    rank: int
    message: WorkerStarted | WorkerEnded | HostLeaves


class ClockNews(msgspec.Struct, frozen=True, tag=True):
    """The present offset of a host's clock: a moment of it plus `offset_s` is one of the head's,
    within `error_s`. The offset changes by `drift_ppm`."""

    rank: int
    offset_s: float
    error_s: float
    drift_ppm: float


class ForHost(msgspec.Struct, frozen=True, tag=True):
    """From the scheduler to the agent of a host."""

    rank: int
    message: StartWorker | StopWorker | DumpWorker


FromHead = HostJoined | HostLost | OfHost | ClockNews
