"""The source of workers, as the scheduler sees it: it can be asked for one."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol


class StartedWorker(NamedTuple):
    """A worker that was asked for and its process id on this host. It has yet to greet."""

    worker: int
    pid: int


class RefusedWorker(NamedTuple):
    """A worker that was asked for and is not available; `reason` is for people."""

    worker: int
    reason: str


class WorkerProcess(Protocol):
    """A worker's process, wherever it is; see `process_lifetime.WatchedProcess`."""

    @property
    def pid(self) -> int: ...
    def fileno(self) -> int: ...
    def wait(self, timeout_s: float = 0.0) -> bool: ...
    def kill(self) -> None: ...
    def ask_for_dump(self) -> None: ...
    def state(self) -> str: ...
    def core_waits_s(self) -> Mapping[int, float]: ...
    def end(self) -> str: ...
    def close(self) -> None: ...


class WorkerSource(Protocol):
    """The server's main process, the agents of several hosts, or a cluster. Never waits."""

    def start_worker(self, worker: int) -> None:
        """Asks for a process that will greet as `worker`, a number not used before."""

    def started(self) -> Iterable[StartedWorker | RefusedWorker]:
        """The outcomes since the last call for workers that were asked for."""

    def watch(self, started: StartedWorker) -> WorkerProcess:
        """The process of a started worker. Raises ProcessLookupError if it has ended."""

    def forget(self, worker: int, *, has_served: bool) -> None:
        """A worker was given up and no longer counts. If it never served, its host may be the
        cause."""

    def is_lost_with_host(self, worker: int) -> bool:
        """True if a worker was lost because its host was; also after `forget`."""

    def are_hosts_there(self) -> bool:
        """True if every host that workers come from is present."""

    def take_leavers(self) -> list[int]:
        """Workers whose host was asked to go since the last call."""

    def clock_offsets_s(self) -> Mapping[int, float]:
        """For workers on another clock than the scheduler's: seconds to add to their moments."""

    def hosts(self) -> list[dict[str, Any]]:
        """For `/server_info`: the hosts that workers come from; JSON types only."""
