"""Stage workers as forks of one process that has imported what they need: seconds less for each.

For tests that are not about how a worker's process starts. Those of a server on CPUs are such
forks, too (`worker_nursery.py`); this one serves all tests of a file.
"""

import select
from collections.abc import Iterator

import pytest

from sgl_pipeline.managers.stages.nursery import Nursery
from sgl_pipeline.managers.stages.stage_processes import StageProcesses
from sgl_pipeline.process_lifetime import WatchedProcess

_TIMEOUT_S = 120.0


class ForkedWorker:
    """The part of `subprocess.Popen` that `StageProcesses` uses. A fork's parent is the nursery:
    `WatchedProcess.end` has its exit code."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = WatchedProcess(pid)

    def poll(self) -> bool | None:
        """None while it runs."""
        return self._process.wait() or None

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        assert self._process.wait(_TIMEOUT_S)


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Every worker that a `StageProcesses` starts is a fork, with one compute thread at first."""
    nursery = Nursery(StageProcesses("")._environment(1))
    assert select.select([nursery._socket], [], [], _TIMEOUT_S)[0], "it imports for too long"

    def spawn(self: StageProcesses, worker: int, threads: int) -> ForkedWorker:
        pid = nursery.fork(self._arguments(worker))
        assert pid is not None, "the nursery has ended"
        return ForkedWorker(pid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageProcesses, "_spawn", spawn)
        yield
    nursery.close()
