"""Brings the stage workers to readiness together, and notices when one dies.

Called by the scheduler process. Workers know only an address; the main process has started them
(`stage_processes.py`). This file decides nothing about requests.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import zmq

from sgl_pipeline.args import PipelineArgs, StageArgs, require
from sgl_pipeline.channels import SchedulerChannel
from sgl_pipeline.errors import ConfigurationError, StageFailure
from sgl_pipeline.managers.stage_processes import pinned_cores, stage_address, stage_threads
from sgl_pipeline.messages import (
    FromWorker,
    MeasureCosts,
    MeasuredCosts,
    PoolSize,
    Shutdown,
    StageAssignment,
    StageLoaded,
    StageReady,
    WorkerFailed,
    WorkerHello,
)
from sgl_pipeline.pp_runner.model_spec import ModelSpec
from sgl_pipeline.process_lifetime import WatchedProcess
from sgl_pipeline.stage_plan import (
    TYPICAL_STEP,
    StagePlan,
    agreed_costs,
    balanced_layer_counts,
    even_layer_counts,
    parse_layer_partition,
    stage_times_ms,
)

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2.0

Message = TypeVar("Message", bound=FromWorker)


@dataclass(frozen=True, slots=True)
class PipelineCapacity:
    """What the ready pipeline has: its plan, pages (the minimum over stages) and each stage's load
    report. `predicted_ms` is what a typical step takes each stage, where that was measured."""

    plan: StagePlan
    predicted_ms: tuple[float, ...] | None
    num_pages: int
    stages: tuple[StageLoaded, ...]
    attention_backend: str
    layer_kernels: str


class StageLauncher:
    """The stages of one server, each filled by the worker of the same number.

    Args:
        spec: of the model, as the stages will read it.
        pids: of the worker processes, by number.
    """

    def __init__(
        self,
        args: PipelineArgs,
        spec: ModelSpec,
        links: tuple[str, ...],
        pids: Sequence[int],
        context: "zmq.Context[zmq.Socket[bytes]]",
    ) -> None:
        self._args = args
        self._spec = spec
        self._links = links
        self._processes = [WatchedProcess(pid) for pid in pids]
        self.channel = SchedulerChannel(context, stage_address(args.run_directory))
        self._failures: dict[int, WorkerFailed] = {}

    @property
    def workers(self) -> range:
        return range(self._args.stages.num_stages)

    def start(self) -> PipelineCapacity:
        """Hands out the stages and returns once every one is ready to take step plans.

        Raises ConfigurationError for what a flag can mend, StageFailure for anything else.
        """
        self._gather(WorkerHello)
        plan, predicted_ms = first_stage_plan(self._args.stages, self._spec), None
        if plan is None:
            plan, predicted_ms = self._plan_by_time()
        for assignment in self._assignments(plan):
            self.channel.send(assignment.stage, assignment)
        loaded = tuple(sorted(self._gather(StageLoaded), key=lambda report: report.stage))
        num_pages = min(report.num_pages for report in loaded)
        self.channel.broadcast(self.workers, PoolSize(num_pages))
        ready = self._gather(StageReady)
        for notice in dict.fromkeys(notice for stage in ready for notice in stage.notices):
            logger.warning("%s", notice)
        first = ready[0]
        return PipelineCapacity(
            plan, predicted_ms, num_pages, loaded, first.attention_backend, first.layer_kernels
        )

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
            if process.wait(timeout_s=0):
                # What it said before it ended explains more than its exit code.
                for _ in self.receive():
                    pass
                if worker in self._failures:
                    return self.check(last_steps)
                raise StageFailure(worker, last_steps.get(worker), process.end())
        return None

    def stop(self) -> None:
        """Ends all workers: asks, waits a moment, kills. To be called once, at any time."""
        self.channel.broadcast(self.workers, Shutdown())
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            if not process.wait(max(0.0, deadline - time.monotonic())):
                process.kill()
            process.close()
        self._processes.clear()
        self.channel.close()

    def _plan_by_time(self) -> tuple[StagePlan, tuple[float, ...]]:
        """The plan whose slowest stage takes least, and each stage's milliseconds."""
        even = even_layer_counts(self._spec.num_layers, len(self.workers))
        for assignment in self._assignments(StagePlan(0, even)):
            self.channel.send(assignment.stage, MeasureCosts(assignment))
        measured = sorted(self._gather(MeasuredCosts), key=lambda report: report.worker)
        costs = agreed_costs(
            [report.costs for report in measured], are_alike=self._args.stages.device == "cpu"
        )
        counts = balanced_layer_counts(costs)
        predicted_ms = stage_times_ms(costs, counts)
        logger.info(
            "layer split %s: %s should take the stages %s ms, %.2f of it for the head; the slowest "
            "of an even split %.2f ms",
            ",".join(map(str, counts)),
            TYPICAL_STEP,
            ", ".join(f"{stage_ms:.2f}" for stage_ms in predicted_ms),
            costs[-1].head_ms,
            max(stage_times_ms(costs, even)),
        )
        return StagePlan(0, counts), predicted_ms

    def _assignments(self, plan: StagePlan) -> list[StageAssignment]:
        """What each worker is told under `plan`."""
        stages: StageArgs = self._args.stages
        threads = stage_threads(plan.num_stages, stages.cpu_threads)
        cores = pinned_cores(stages.device, plan.num_stages)
        return [
            StageAssignment(
                stage=stage,
                plan=plan,
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
                cpu_threads=threads[stage],
                cpu_cores=cores[stage],
            )
            for stage in self.workers
        ]

    def _gather(self, kind: type[Message]) -> list[Message]:
        """One message of `kind` from every worker."""
        gathered: list[Message] = []
        while len(gathered) < len(self.workers):
            if not self.channel.socket.poll(200):
                self.check({})
            gathered += [message for message in self.receive() if isinstance(message, kind)]
            if self._failures:
                self.check({})
        return gathered


def first_stage_plan(stages: StageArgs, spec: ModelSpec) -> StagePlan | None:
    """The plan that `--pp` and `--pp-layer-partition` ask for on the model of `spec`; None where
    the workers' times will decide.

    Raises ConfigurationError when the model cannot be split so.
    """
    return parse_layer_partition(stages.layer_partition, stages.num_stages, spec.num_layers)


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
