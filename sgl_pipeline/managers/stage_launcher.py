"""Starts the stage workers, brings them to readiness together, and notices when one dies.

Called by the scheduler process. Workers are plain child processes that know only an address, so
they import torch but never sglang. This file decides nothing about requests.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import zmq

from sgl_pipeline.args import PipelineArgs, StageArgs, require
from sgl_pipeline.channels import SchedulerChannel
from sgl_pipeline.errors import ConfigurationError, StageFailure
from sgl_pipeline.messages import (
    FromWorker,
    PoolSize,
    Shutdown,
    StageAssignment,
    StageLoaded,
    StageReady,
    WorkerFailed,
    WorkerHello,
)
from sgl_pipeline.pp_runner.model_spec import ModelSpec
from sgl_pipeline.stage_plan import StagePlan, parse_layer_partition

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2.0

Message = TypeVar("Message", bound=FromWorker)


@dataclass(frozen=True, slots=True)
class PipelineCapacity:
    """What the ready pipeline has: pages (the minimum over stages) and each stage's load report."""

    num_pages: int
    stages: tuple[StageLoaded, ...]
    attention_backend: str
    layer_kernels: str


class StageLauncher:
    """The stage processes of one server."""

    def __init__(
        self,
        args: PipelineArgs,
        plan: StagePlan,
        links: tuple[str, ...],
        context: "zmq.Context[zmq.Socket[bytes]]",
    ) -> None:
        self._args = args
        self._plan = plan
        self._links = links
        self._address = f"ipc://{args.run_directory}/stages"
        self.channel = SchedulerChannel(context, self._address)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failures: dict[int, WorkerFailed] = {}

    @property
    def workers(self) -> range:
        return range(self._plan.num_stages)

    def start(self) -> PipelineCapacity:
        """Starts all workers and returns once every stage is ready to take step plans.

        Raises ConfigurationError for what a flag can mend, StageFailure for anything else.
        """
        core_sets = split_cores(sorted(os.sched_getaffinity(0)), self._plan.num_stages)
        threads = [self._args.stages.cpu_threads or max(1, len(cores)) for cores in core_sets]
        for worker in self.workers:
            self._processes.append(self._spawn(worker, threads[worker]))
        self._gather(WorkerHello)
        for stage in self.workers:
            self.channel.send(stage, self._assignment(stage, threads[stage], core_sets[stage]))
        loaded = tuple(sorted(self._gather(StageLoaded), key=lambda report: report.stage))
        num_pages = min(report.num_pages for report in loaded)
        self.channel.broadcast(self.workers, PoolSize(num_pages))
        ready = self._gather(StageReady)
        for notice in dict.fromkeys(notice for stage in ready for notice in stage.notices):
            logger.warning("%s", notice)
        first = ready[0]
        return PipelineCapacity(num_pages, loaded, first.attention_backend, first.layer_kernels)

    def receive(self) -> Iterator[FromWorker]:
        """Messages that have arrived. A WorkerFailed is kept as the reason for `check`."""
        while (message := self.channel.receive()) is not None:
            if isinstance(message, WorkerFailed):
                self._failures[message.worker] = message
            else:
                yield message

    def check(self, last_steps: Mapping[int, int]) -> None:
        """Raises StageFailure when a worker has failed or ended.

        Args:
            last_steps: the last step that each stage reported, for the message.
        """
        for worker, failure in self._failures.items():
            if failure.is_configuration:
                raise ConfigurationError(f"stage {worker}: {failure.message}")
            raise StageFailure(worker, last_steps.get(worker), failure.message)
        for worker, process in enumerate(self._processes):
            if (code := process.poll()) is not None:
                # What it said before it ended explains more than its exit code.
                for _ in self.receive():
                    pass
                if worker in self._failures:
                    return self.check(last_steps)
                reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                raise StageFailure(worker, last_steps.get(worker), f"its process ended, {reason}")
        return None

    def stop(self) -> None:
        """Ends all workers: asks, waits a moment, kills. To be called once, at any time."""
        self.channel.broadcast(self.workers, Shutdown())
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self.channel.close()

    def _spawn(self, worker: int, threads: int) -> subprocess.Popen[bytes]:
        package_root = str(Path(__file__).resolve().parents[2])
        environment = dict(os.environ)
        # OpenMP reads these before torch can be told; spinning threads would starve the neighbours.
        environment |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        # Weights in huge pages: a fifth off a step of few rows, which is bound by reading them.
        environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        # All stages are on this host; the libraries would listen on its outer interfaces too.
        environment |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        paths = [package_root, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        module = "sgl_pipeline.pp_runner.stage_worker"
        command = [sys.executable, "-m", module]
        command += ["--address", self._address, "--worker", str(worker)]
        command += ["--parent", str(os.getpid())]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    def _assignment(self, stage: int, threads: int, cores: tuple[int, ...]) -> StageAssignment:
        stages: StageArgs = self._args.stages
        return StageAssignment(
            stage=stage,
            plan=self._plan,
            model_path=stages.model_path,
            load_format=stages.load_format,
            dtype=stages.dtype,
            device=stages.device,
            attention_backend=stages.attention_backend,
            graphs=stages.graphs,
            layer_kernels=stages.layer_kernels,
            page_size=self._args.scheduling.page_size,
            max_total_tokens=stages.max_total_tokens,
            memory_fraction=stages.memory_fraction,
            links=self._links,
            cpu_threads=threads,
            cpu_cores=cores,
        )

    def _gather(self, kind: type[Message]) -> list[Message]:
        """One message of `kind` from every worker."""
        gathered: list[Message] = []
        while len(gathered) < self._plan.num_stages:
            if not self.channel.socket.poll(200):
                self.check({})
            gathered += [message for message in self.receive() if isinstance(message, kind)]
            if self._failures:
                self.check({})
        return gathered


def first_stage_plan(stages: StageArgs, spec: ModelSpec) -> StagePlan:
    """The plan that `--pp` and `--pp-layer-partition` ask for on the model of `spec`.

    Raises ConfigurationError when the model cannot be split so.
    """
    return parse_layer_partition(stages.layer_partition, stages.num_stages, spec.layer_costs())


def split_cores(cores: list[int], num_stages: int) -> list[tuple[int, ...]]:
    """The cores of each stage: equal runs, or none (no pinning) where stages outnumber cores."""
    if num_stages > len(cores):
        return [()] * num_stages
    bounds = [stage * len(cores) // num_stages for stage in range(num_stages + 1)]
    return [tuple(cores[bounds[s] : bounds[s + 1]]) for s in range(num_stages)]


def link_addresses(args: PipelineArgs, num_gpus: int) -> tuple[str, ...]:
    """One address for each stage boundary, of the link that `--stage-link` means.

    Raises ConfigurationError where the GPUs do not allow it.
    """
    num_stages, link = args.stages.num_stages, args.stages.link
    boundaries = range(num_stages - 1)
    has_gpu_each = args.stages.device == "cuda" and num_gpus >= num_stages
    if link == "auto":
        link = "nccl" if has_gpu_each else "host"
    if link == "nccl":
        require(
            has_gpu_each,
            f"--stage-link nccl needs a GPU for each of the {num_stages} stages, there are "
            f"{num_gpus}; use --stage-link host",
        )
        return tuple(f"nccl:{args.run_directory}/rendezvous" for _ in boundaries)
    if link == "cuda-ipc":
        require(
            num_gpus == 1,
            f"--stage-link cuda-ipc is for stages that share one GPU, there are {num_gpus}; set "
            "CUDA_VISIBLE_DEVICES to one, or use --stage-link auto",
        )
    kind = {"host": "unix", "cuda-ipc": "cuda-ipc"}[link]
    return tuple(f"{kind}:{args.run_directory}/link-{boundary}" for boundary in boundaries)
