"""The stage worker processes, as the server's main process owns them: started, and surely ended.

Used by `launch_server.py`, which starts them before it imports SGLang, so that torch is imported on
the other cores meanwhile. They wait for the scheduler process, which binds the address that they
connect to. Must import neither torch nor sglang.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# More are started only once the whole command line has been checked.
_MOST_UNCHECKED_STAGES = 16


class StageProcesses:
    """The workers of one server, numbered from 0. `close` must be called in the end.

    Args:
        run_directory: where the socket of `stage_address` will be.
    """

    def __init__(self, run_directory: str) -> None:
        self._address = stage_address(run_directory)
        self._threads: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by worker number. They stay taken until `close`, also when one has ended."""
        return tuple(process.pid for process in self._processes)

    def start(self, num_stages: int, cpu_threads: int | None) -> None:
        """Starts a worker for each stage, unless the same ones were started before.

        Args:
            cpu_threads: compute threads of a stage; None: the cores are split over the stages.
        """
        threads = stage_threads(num_stages, cpu_threads)
        if threads != self._threads:
            self.close()
            self._threads = threads
            for worker in range(num_stages):
                self._processes.append(self._spawn(worker))

    def start_unchecked(self, argv: Sequence[str]) -> None:
        """Starts the workers that `argv` asks for on the face of it; `start` puts right what that
        got wrong, as it does with abbreviated flags and those of a `--config` file."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("--pp", "--pp-size", "--pipeline-parallel-size", type=int, default=1)
        parser.add_argument("--cpu-threads-per-stage", type=int)
        try:
            options, _ = parser.parse_known_args(argv)
        except argparse.ArgumentError:
            return
        if 1 <= options.pp <= _MOST_UNCHECKED_STAGES:
            self.start(options.pp, options.cpu_threads_per_stage)

    def close(self) -> None:
        """Kills the workers that are left."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def _spawn(self, worker: int) -> subprocess.Popen[bytes]:
        package_root = str(Path(__file__).resolve().parents[2])
        environment = dict(os.environ)
        # OpenMP reads these before torch can be told. Threads spin for the next kernel of a step, a
        # millisecond at most, as waking them takes long; then they sleep, for the neighbours' sake.
        environment |= {
            "OMP_NUM_THREADS": str(self._threads[worker]),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        environment.setdefault("GOMP_SPINCOUNT", "20000")
        # Weights in huge pages: a fifth off a step of few rows, which is bound by reading them.
        environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        # All stages are on this host; the libraries would listen on its outer interfaces too.
        environment |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        paths = [package_root, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, "-m", "sgl_pipeline.pp_runner.stage_process"]
        command += ["--address", self._address, "--worker", str(worker)]
        command += ["--parent", str(os.getpid())]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)


def stage_address(run_directory: str) -> str:
    """Where the scheduler process meets the workers."""
    return f"ipc://{run_directory}/stages"


def stage_threads(num_stages: int, cpu_threads: int | None) -> list[int]:
    """Compute threads of each stage: as many as asked for, else its share of the cores."""
    return [cpu_threads or max(1, len(cores)) for cores in stage_cores(num_stages)]


def stage_cores(num_stages: int) -> list[tuple[int, ...]]:
    """The cores of each stage, of those that this process may use; see `split_cores`."""
    return split_cores(sorted(os.sched_getaffinity(0)), num_stages)


def pinned_cores(device: str, num_stages: int) -> list[tuple[int, ...]]:
    """The cores that each stage stays on; empty where it is not pinned.

    On a GPU none is: threads of the driver and of NCCL, and a compiler that a stage starts, would
    share its cores, and which cores are near its GPU is not known here.
    """
    return stage_cores(num_stages) if device == "cpu" else [()] * num_stages


def split_cores(cores: list[int], num_stages: int) -> list[tuple[int, ...]]:
    """The cores of each stage: equal runs, or none (no pinning) where stages outnumber cores."""
    if num_stages > len(cores):
        return [()] * num_stages
    bounds = [stage * len(cores) // num_stages for stage in range(num_stages + 1)]
    return [tuple(cores[bounds[s] : bounds[s + 1]]) for s in range(num_stages)]
