"""Stage workers that are started before anything is known, put right later, and surely ended."""

import os
import time

import psutil
import pytest

from sgl_pipeline.managers.stages.stage_processes import StageProcesses, WorkerPlace
from sgl_pipeline.process_lifetime import WatchedProcess


@pytest.fixture
def stages(tmp_path):
    stages = StageProcesses(str(tmp_path))
    yield stages
    stages.close()


def workers() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "sgl_pipeline.pp_runner.stage_process" in command_line(child)
    ]


def command_line(process: psutil.Process) -> list[str]:
    """Once the kernel shows it: it lets the parent go on a moment earlier in an `exec`."""
    deadline_s = time.monotonic() + 10.0
    while not (arguments := process.cmdline()) and time.monotonic() < deadline_s:
        if process.status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.001)
    return arguments


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("num_stages", "num_hosts", "num_workers"),
    [
        (1, 1, 1),
        (3, 1, 3),
        (4, 2, 2),
        # Impossible numbers are left to the parser, which can say why.
        (1_000_000, 1, 0),
        (0, 1, 0),
        (2, 3, 0),
    ],
)
def test_early_workers_are_those_of_the_head(stages, num_stages, num_hosts, num_workers):
    stages.start_unchecked(num_stages, num_hosts, None)
    assert len(stages.pids) == num_workers
    assert {process.pid for process in workers()} == set(stages.pids)


@pytest.mark.multiproc
def test_workers_are_replaced_only_when_others_are_needed(stages):
    stages.start_unchecked(2, 1, None)
    first = stages.pids
    stages.start(2, None)
    assert stages.pids == first
    stages.start(3, None)
    assert len(stages.pids) == 3
    assert {process.pid for process in workers()} == set(stages.pids)


@pytest.mark.multiproc
def test_a_worker_that_has_ended_keeps_its_process_id_until_all_are_closed(stages):
    stages.start(1, None)
    (pid,) = stages.pids
    psutil.Process(pid).kill()
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    stages.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.multiproc
def test_the_number_of_threads_is_set_before_torch_is_there(stages):
    stages.start(2, cpu_threads=3)
    assert [process.environ()["OMP_NUM_THREADS"] for process in workers()] == ["3", "3"]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("place", "interface"),
    [(WorkerPlace(), "lo"), (WorkerPlace("h:1", "o:1", "m", "eth7"), "eth7")],
)
def test_torch_distributed_uses_the_interface_of_the_cluster_port_alone(tmp_path, place, interface):
    stages = StageProcesses(str(tmp_path), place)
    try:
        stages.start(1, 1)
        (worker,) = workers()
        environment = worker.environ()
        assert environment["NCCL_SOCKET_IFNAME"] == f"={interface}"
        assert environment["GLOO_SOCKET_IFNAME"] == interface
    finally:
        stages.close()


def forked(stages: StageProcesses, worker: int) -> int:
    """The process id of a worker that the nursery has forked, once it is ready to."""
    deadline_s = time.monotonic() + 60.0
    while time.monotonic() < deadline_s:
        pid = stages.start_another(worker)
        assert pid is not None
        if psutil.Process(pid).ppid() != os.getpid():
            return pid
        psutil.Process(pid).kill()  # a process of its own: the nursery still imports
        time.sleep(0.5)
    raise AssertionError("the nursery never got ready")


@pytest.mark.multiproc
def test_later_workers_are_forks_and_go_with_the_nursery(stages):
    stages.start(1, cpu_threads=2, forks=True)
    first, second = (psutil.Process(forked(stages, worker)) for worker in (1, 2))
    assert first.ppid() == second.ppid() != os.getpid()
    assert psutil.Process(second.ppid()).environ()["OMP_NUM_THREADS"] == "2"
    psutil.Process(first.ppid()).terminate()  # the server's end is not its to bring about
    second.terminate()
    assert WatchedProcess(second.pid).wait(10.0) and first.is_running()
    first.kill()
    # How it ended can be read until the next one is asked for.
    watched = WatchedProcess(first.pid)
    assert watched.wait(10.0) and watched.end() == "its process ended, killed by signal 9"
    third = psutil.Process(forked(stages, 3))
    assert not first.is_running()
    # A nursery that ends takes its workers along, and another one takes its place.
    psutil.Process(third.ppid()).kill()
    psutil.wait_procs([third], timeout=10.0)
    assert not third.is_running()
    assert psutil.Process(forked(stages, 4)).is_running()
    stages.close()
    assert stages.start_another(5) is None
    assert not [
        one for one in psutil.Process().children() if "worker_nursery" in str(one.cmdline())
    ]
