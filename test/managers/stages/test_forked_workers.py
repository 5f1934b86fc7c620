"""The first workers of stages on CPUs: forks of one process, which are surely ended with it."""

import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.live_server import wait_until

from sgl_pipeline.errors import StageFailure
from sgl_pipeline.managers.stages.main_process_workers import (
    MainProcessWorkers,
    serve_worker_requests,
)
from sgl_pipeline.managers.stages.nursery import Nursery
from sgl_pipeline.managers.stages.stage_processes import StageProcesses
from sgl_pipeline.managers.stages.worker_processes import WorkerProcesses
from sgl_pipeline.process_lifetime import WatchedProcess

pytestmark = pytest.mark.multiproc


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[StageProcesses]:
    stages = StageProcesses(str(tmp_path))
    yield stages
    stages.close()


def number_of(worker: psutil.Process) -> str:
    """From its title, which it has a moment after its process id is known."""
    wait_until(lambda: "--worker" in " ".join(worker.cmdline()))
    words = " ".join(worker.cmdline()).split()
    return words[words.index("--worker") + 1]


def test_the_first_workers_are_forks_and_none_is_left_when_they_are_closed(
    stages: StageProcesses,
) -> None:
    stages.start_unchecked(3, 1, 2, forks=True)
    own_end, scheduler_end = multiprocessing.Pipe()
    serve_worker_requests(own_end, stages)
    pids = MainProcessWorkers(scheduler_end).first_pids()
    workers = [psutil.Process(pid) for pid in pids]
    (nursery,) = {one.ppid() for one in workers}
    assert psutil.Process(nursery).ppid() == os.getpid()
    assert [number_of(one) for one in workers] == ["0", "1", "2"]
    stages.start(3, 2, forks=True)
    assert stages.pids == tuple(pids)
    watched = [WatchedProcess(pid) for pid in (nursery, *pids)]
    stages.close()
    assert all(one.wait(1.0) for one in watched)


def test_workers_on_gpus_take_the_place_of_forks(stages: StageProcesses) -> None:
    stages.start_unchecked(2, 1, 1, forks=True)
    stages.start(2, 1)
    assert [psutil.Process(pid).ppid() for pid in stages.pids] == [os.getpid()] * 2
    children = " ".join(str(one.cmdline()) for one in psutil.Process().children())
    assert "worker_nursery" not in children


def test_a_worker_that_nobody_can_wait_for_is_a_failed_stage() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    with pytest.raises(StageFailure, match="stage 1 failed before its first step: its process"):
        WorkerProcesses([os.getpid(), gone.pid])


def test_a_nursery_that_ends_is_seen_as_the_end_of_each_worker(
    stages: StageProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Nursery, "module", "sgl_pipeline.nothing")
    stages.start(2, 1, forks=True)
    for pid in stages.pids:
        watched = WatchedProcess(pid)
        assert watched.wait(10.0) and watched.end() == "its process ended, exit code 1"
        watched.close()
