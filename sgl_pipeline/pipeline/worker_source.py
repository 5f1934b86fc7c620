"""Where workers come from, as the scheduler sees it: somebody who can be asked for one."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class StartedWorker(NamedTuple):
    """A worker that was asked for and its process id on this host. It has yet to greet."""

    worker: int
    pid: int


class WorkerSource(Protocol):
    """The server's main process, an agent on another host, or a cluster. Never waits."""

    def start_worker(self, worker: int) -> None:
        """Asks for a process that will greet as `worker`, a number not used before."""

    def started(self) -> Iterable[StartedWorker]:
        """Those that have been started since the last call."""
