"""Owns the stage worker processes for the main process: starts them, and makes sure that they end.

They start before the main process imports SGLang, so that torch is imported on other cores
meanwhile; on CPUs by one process, of which the workers are forks (`nursery.py`). They wait for the
scheduler process, which binds the address that they connect to. Must import neither torch nor
sglang.
"""

import os
import subprocess
import sys
import threading
from typing import NamedTuple

from sgl_pipeline.managers.stages.nursery import Nursery
from sgl_pipeline.pipeline.assignment import num_threads, split_cores, workers_of_host
from sgl_pipeline.process_lifetime import child_environment

# More are started only once the whole command line has been checked.
_MOST_UNCHECKED_STAGES = 16


class WorkerPlace(NamedTuple):
    """The host of a worker, if the pipeline has several.

    `head_address` is the head's cluster port, empty on the head itself; `host_address` that of the
    worker's own host, on `interface`; `model_path` the model's path on this host, if it differs
    from the head's.
    """

    head_address: str = ""
    host_address: str = ""
    model_path: str = ""
    interface: str = "lo"


class StageProcesses:
    """The workers of one host, numbered from 0 on the head. `close` must be called in the end.

    Args:
        run_directory: of this host; on the head the socket of `stage_address` will be there.
    """

    module = "sgl_pipeline.pp_runner.stage_process"
    nursery_type = Nursery

    def __init__(self, run_directory: str, place: WorkerPlace | None = None) -> None:
        self.run_directory = run_directory
        self.place = place or WorkerPlace()
        self._threads: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._nursery: Nursery | None = None
        # `close` and `start_another` come from different threads.
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the first workers, by number; waits for forks. Until another worker is
        started they are not reused, even if a worker has ended."""
        if self._nursery is not None:
            return self._nursery.ordered_pids()
        return tuple(process.pid for process in self._processes)

    def start(self, num_stages: int, cpu_threads: int | None, *, forks: bool = False) -> None:
        """Starts a worker for each stage, unless the same ones were started before.

        Args:
            cpu_threads: compute threads of a stage; None: the cores are split over the stages.
            forks: these and later workers are forks of one process that imports what they need.
                Not for stages on GPUs.
        """
        threads = stage_threads(num_stages, cpu_threads)
        if threads == self._threads and forks == (self._nursery is not None):
            return
        self._kill_all()
        self._threads = threads
        if forks:
            self._nursery = self.nursery_type(self._environment(max(threads)))
            self._nursery.order([self._arguments(worker) for worker in range(len(threads))])
            return
        for worker, own_threads in enumerate(threads):
            self._processes.append(self._spawn(worker, own_threads))

    def start_another(self, worker: int, threads: int | None = None) -> int | None:
        """Starts one more worker, which greets as `worker`, with as many compute threads as the
        first ones unless told otherwise. Returns its process id; None when the server is about to
        end."""
        with self._lock:
            if self._is_closed:
                return None
            # Their ends have been noticed by now: others are started after that.
            self._processes = [one for one in self._processes if one.poll() is None]
            if self._nursery is not None and threads is None:
                pid = self._nursery.fork(self._arguments(worker))
                if pid is not None:
                    return pid
            self._processes.append(self._spawn(worker, threads or max(self._threads, default=1)))
            return self._processes[-1].pid

    def start_unchecked(
        self,
        num_stages: int,
        num_hosts: int,
        cpu_threads: int | None,
        *,
        forks: bool = False,
    ) -> None:
        """Starts the head's workers early, from a rough reading of the command line; `start`
        corrects it where that was wrong, as it is with abbreviated flags."""
        if 1 <= num_hosts <= num_stages <= _MOST_UNCHECKED_STAGES:
            self.start(len(workers_of_host(num_stages, num_hosts, 0)), cpu_threads, forks=forks)

    def stop_all(self) -> None:
        """Kills the workers that are left."""
        with self._lock:
            self._kill_all()

    def close(self) -> None:
        """Kills the workers that are left; no other will be started."""
        with self._lock:
            self._is_closed = True
            self._kill_all()

    def _kill_all(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes.clear()
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None

    def _spawn(self, worker: int, threads: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", self.module, *self._arguments(worker)]
        command += ["--parent", str(os.getpid())]
        environment = self._environment(threads)
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    def _environment(self, threads: int) -> dict[str, str]:
        """The environment of workers with `threads` compute threads."""
        # OpenMP reads these before torch can be told. Threads spin for the next kernel of a step, a
        # millisecond at most, as waking them takes long; then they sleep, for the neighbors' sake.
        environment = child_environment(OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE")
        environment.setdefault("GOMP_SPINCOUNT", "20000")
        # Weights in huge pages: a fifth off a step of few rows, which is bound by reading them.
        environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        # They would listen on every interface; without other hosts only the loopback is used.
        interface = self.place.interface
        return environment | {
            "NCCL_SOCKET_IFNAME": f"={interface}",
            "GLOO_SOCKET_IFNAME": interface,
        }

    def _arguments(self, worker: int) -> list[str]:
        """The arguments of `stage_process.py`, without the parent."""
        address = self.place.head_address or stage_address(self.run_directory)
        arguments = ["--address", address, "--worker", str(worker)]
        arguments += ["--run-directory", self.run_directory]
        if self.place.host_address:
            arguments += ["--host-address", self.place.host_address]
        if self.place.model_path:
            arguments += ["--model-path", self.place.model_path]
        return arguments


def stage_address(run_directory: str) -> str:
    """The address at which the scheduler process meets the workers."""
    return f"ipc://{run_directory}/stages"


def stage_threads(num_stages: int, cpu_threads: int | None) -> list[int]:
    """Compute threads of each stage, when all of them share the cores of this process."""
    cores = split_cores(sorted(os.sched_getaffinity(0)), num_stages)
    return [num_threads(own, cpu_threads) for own in cores]
