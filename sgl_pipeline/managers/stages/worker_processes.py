"""The processes of workers, on any host: watched until they end, and ended in time."""

import select
import time
from collections.abc import Sequence

from sgl_pipeline.errors import StageFailure
from sgl_pipeline.pipeline.worker_source import WorkerProcess
from sgl_pipeline.process_lifetime import WatchedProcess

STOP_TIMEOUT_S = 2.0


class WorkerProcesses:
    """By the numbers of their workers. Those that were dismissed are apart: their end is no loss.

    Args:
        pids: of workers of this host, by number.

    Raises StageFailure for one that has ended and was waited for.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._watched: dict[int, WorkerProcess] = {}
        # With their deadlines.
        self._dismissed: dict[int, tuple[WorkerProcess, float]] = {}
        self._ends = select.epoll()
        for worker, pid in enumerate(pids):
            try:
                process = WatchedProcess(pid)
            except ProcessLookupError:
                # A fork's parent has ended too, or it would be there to wait for.
                raise StageFailure(worker, None, "its process ended at once") from None
            self.watch(worker, process)

    @property
    def numbers(self) -> list[int]:
        """All workers that have a process, dismissed ones too."""
        return [*self._watched, *self._dismissed]

    def fileno(self) -> int:
        """A descriptor that can be read while a watched process has ended."""
        return self._ends.fileno()

    def get(self, worker: int) -> WorkerProcess | None:
        """The watched process of `worker`, if it has one."""
        return self._watched.get(worker)

    def watch(self, worker: int, process: WorkerProcess) -> None:
        """`process` is that of `worker` from now on."""
        self._watched[worker] = process
        self._ends.register(process, select.EPOLLIN)

    def ended(self) -> dict[int, WorkerProcess]:
        """The watched processes that have ended."""
        return {worker: process for worker, process in self._watched.items() if process.wait(0)}

    def kill(self, worker: int) -> None:
        """Ends the process of `worker`, if it has one, and forgets it."""
        process = self._watched.pop(worker, None)
        if process is None and worker in self._dismissed:
            process, _ = self._dismissed.pop(worker)
        if process is not None:
            process.kill()
            process.close()

    def dismiss(self, worker: int) -> None:
        """The process of `worker`, if it has one, was asked to end, and has some time for
        it."""
        process = self._watched.pop(worker, None)
        if process is not None:
            self._ends.unregister(process)
            self._dismissed[worker] = process, time.monotonic() + STOP_TIMEOUT_S

    def done(self) -> list[int]:
        """The dismissed workers that have ended, or had time enough."""
        now_s = time.monotonic()
        dismissed = self._dismissed.items()
        return [
            worker for worker, (process, until_s) in dismissed if process.wait(0) or now_s > until_s
        ]

    def end_all(self) -> None:
        """Waits a moment for all, which were asked to end, and kills the others."""
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for process in (*self._watched.values(), *(one for one, _ in self._dismissed.values())):
            if not process.wait(max(0.0, deadline_s - time.monotonic())):
                process.kill()
            process.close()
        self._watched.clear()
        self._dismissed.clear()
        self._ends.close()
