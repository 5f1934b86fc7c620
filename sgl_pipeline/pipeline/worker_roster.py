"""The workers of one pipeline: who has come, which stage each fills, how far it has got.

Driven by `managers/stages/stage_launcher.py`, which brings the workers' messages and sends what
this answers. A worker may come at any time, and each goes its own way: greeted, measured where
layers are split by time, assigned, loaded, ready. Does no I/O.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum, auto

from sgl_pipeline import __version__
from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.errors import ConfigurationError, ProtocolError
from sgl_pipeline.layer_partition import even_layer_counts, parse_layer_partition
from sgl_pipeline.messages import (
    FromWorker,
    MeasureCosts,
    MeasuredCosts,
    PoolSize,
    Regroup,
    Regrouped,
    StageLoaded,
    StageReady,
    ToWorker,
    WorkerHello,
)
from sgl_pipeline.migration.cost_model import agreed_costs, predicted_costs, stage_times_ms
from sgl_pipeline.migration.partition import balanced_layer_counts, fits_in
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.pipeline.assignment import assign, link_addresses
from sgl_pipeline.stage_costs import TYPICAL_STEP, PartCosts, StageCosts
from sgl_pipeline.stage_plan import StagePlan

logger = logging.getLogger(__name__)

# A message and the worker that it is for.
Addressed = tuple[int, ToWorker]


class WorkerPhase(IntEnum):
    """How far a worker has got. MEASURING leads back to GREETED; LOST may come at any time and is
    the end."""

    GREETED = auto()
    MEASURING = auto()
    ASSIGNED = auto()
    LOADED = auto()
    SIZED = auto()
    READY = auto()
    LOST = auto()


@dataclass(slots=True, eq=False)
class Worker:
    """One worker. `stage` is None until it is assigned. `incarnation` is the stream of orders that
    its links are for, `asked_incarnation` that for which it was told to open some."""

    hello: WorkerHello
    phase: WorkerPhase = WorkerPhase.GREETED
    stage: int | None = None
    costs: PartCosts | None = None
    loaded: StageLoaded | None = None
    ready: StageReady | None = None
    incarnation: int = -1
    asked_incarnation: int = -1

    @property
    def is_joining(self) -> bool:
        """It fills a stage, and has yet to get ready or to regroup."""
        return self.stage is not None and self.incarnation < self.asked_incarnation


@dataclass(frozen=True, slots=True)
class PipelineCapacity:
    """What the ready pipeline has: its plan, pages (the minimum over stages) and each stage's
    report of its load. `predicted_ms` is what a typical step takes each stage, where that was
    measured; `layer_page_bytes` the bytes of a page in one layer."""

    plan: StagePlan
    predicted_ms: tuple[float, ...] | None
    num_pages: int
    stages: tuple[StageLoaded, ...]
    attention_backend: str
    layer_kernels: str
    layer_page_bytes: int


class WorkerRoster:
    """`plan` and `num_pages` are None until they are decided; they hold for later workers too.
    `incarnation` is that of the stream of orders which stages join now.

    Args:
        num_layers: of the model.
        predictor: of its parts' times on each of the workers; None: they time a typical step.

    Raises ConfigurationError when the model cannot be split as `args` asks.
    """

    def __init__(
        self, args: PipelineArgs, num_layers: int, predictor: StepPredictor | None = None
    ) -> None:
        self._predictor = predictor
        self._args = args
        self._num_layers = num_layers
        self._num_stages = args.stages.num_stages
        self._workers: dict[int, Worker] = {}
        self.plan = parse_layer_partition(args.stages.layer_partition, self._num_stages, num_layers)
        self.predicted_ms: tuple[float, ...] | None = None
        self.num_pages: int | None = None
        self.incarnation = 0
        self._first_plan = self.plan
        # Of the newest worker of each stage, also where that was lost.
        self._hellos: dict[int, WorkerHello] = {}

    @property
    def spare_workers(self) -> tuple[int, ...]:
        """Workers that have greeted and fill no stage."""
        return tuple(
            number
            for number, worker in self._workers.items()
            if worker.phase is WorkerPhase.GREETED
        )

    @property
    def workers_of_stages(self) -> list[int]:
        """The worker that fills each stage, where one does, in the order of the stages."""
        filled = [(one.stage, n) for n, one in self._workers.items() if one.stage is not None]
        return [number for _, number in sorted(filled)]

    def worker_of(self, stage: int) -> int | None:
        """The worker that fills `stage`, if one does."""
        return next((n for n, one in self._workers.items() if one.stage == stage), None)

    def worker_stage(self, number: int) -> int | None:
        """The stage that a worker fills, if it fills one."""
        worker = self._workers.get(number)
        return None if worker is None else worker.stage

    @property
    def can_regroup(self) -> bool:
        """Whether stages that run can be joined anew: NCCL's processes are joined for life."""
        hellos = [self._hellos[stage] for stage in sorted(self._hellos)]
        return not any(link.startswith("nccl") for link in link_addresses(self._args, hellos))

    @property
    def vacant_stages(self) -> list[int]:
        """Those that no worker fills."""
        return [stage for stage in range(self._num_stages) if self._filling(stage) is None]

    @property
    def late_workers(self) -> list[int]:
        """Those that have been told to join a stage's neighbors and have not done so."""
        return [number for number, worker in self._workers.items() if worker.is_joining]

    @property
    def has_regrouped(self) -> bool:
        """Whether all stages that were not lost are ready for the stream of `incarnation`."""
        ready = (one for one in self._workers.values() if one.phase is WorkerPhase.READY)
        return all(one.incarnation == self.incarnation for one in ready)

    @property
    def is_complete(self) -> bool:
        """Whether every stage has a worker that is ready for the stream of `incarnation`."""
        filling = [one for one in self._workers.values() if one.stage is not None]
        is_ready = [one.phase is WorkerPhase.READY for one in filling]
        return len(is_ready) == self._num_stages and all(is_ready) and self.has_regrouped

    def is_ready(self, number: int) -> bool:
        """Whether a worker is ready to take orders, of whatever stream."""
        worker = self._workers.get(number)
        return worker is not None and worker.phase is WorkerPhase.READY

    def has_greeted(self, number: int) -> bool:
        """Whether a worker has said hello, whatever became of it."""
        return number in self._workers

    def stage_of(self, number: int) -> int:
        """The stage that a worker fills; its own number where it has none yet."""
        worker = self._workers.get(number)
        return number if worker is None or worker.stage is None else worker.stage

    def take(self, message: FromWorker) -> list[Addressed]:
        """Books a worker's message of its way to readiness; returns what follows from it.

        Raises ConfigurationError where the workers cannot run the pipeline as it was asked for, and
        ProtocolError for a message that is not the worker's next.
        """
        if isinstance(message, WorkerHello):
            self._greet(message)
        elif isinstance(message, MeasuredCosts):
            worker = self._expect(self._workers.get(message.worker), WorkerPhase.MEASURING, message)
            worker.costs, worker.phase = message.costs, WorkerPhase.GREETED
        elif isinstance(message, StageLoaded):
            worker = self._expect(self._filling(message.stage), WorkerPhase.ASSIGNED, message)
            worker.loaded, worker.phase = message, WorkerPhase.LOADED
        elif isinstance(message, StageReady):
            worker = self._expect(self._filling(message.stage), WorkerPhase.SIZED, message)
            worker.ready, worker.phase = message, WorkerPhase.READY
            worker.incarnation = worker.asked_incarnation
        elif isinstance(message, Regrouped):
            worker = self._expect(self._filling(message.stage), WorkerPhase.READY, message)
            worker.incarnation = message.incarnation
        else:
            raise ProtocolError(f"a worker that is not ready sent {type(message).__name__}")
        return list(self._what_follows())

    def lose(self, number: int) -> int | None:
        """The worker has ended. Returns the stage that it filled, which is vacant now, if any."""
        worker = self._workers.get(number)
        if worker is None:
            return None
        worker.phase, stage = WorkerPhase.LOST, worker.stage
        worker.stage = None
        return stage

    def regroup(self, plan: StagePlan, incarnation: int) -> None:
        """The stages shall join each other anew, under `plan`, for the stream of `incarnation`:
        `fill` says what each must be told."""
        self.plan, self.incarnation = plan, incarnation

    def fill(self) -> list[Addressed]:
        """What workers must be told now, beyond the answers to what they said."""
        return [*self._regroup_ready(), *self._what_follows()]

    def capacity(self) -> PipelineCapacity | None:
        """The pipeline, once a ready worker fills every stage."""
        workers = [self._filling(stage) for stage in range(self._num_stages)]
        loaded = tuple(worker.loaded for worker in workers if worker and worker.loaded)
        ready = [worker.ready for worker in workers if worker and worker.ready]
        if self.plan is None or self.num_pages is None or len(ready) < self._num_stages:
            return None
        return PipelineCapacity(
            self.plan,
            self.predicted_ms,
            self.num_pages,
            loaded,
            ready[0].attention_backend,
            ready[0].layer_kernels,
            loaded[0].page_bytes // self._args.migration.max_layers(self.plan)[0],
        )

    def notices(self) -> Iterable[str]:
        """What the stages want the user to know, each thing once."""
        ready = (worker.ready for worker in self._workers.values() if worker.ready)
        return dict.fromkeys(notice for stage in ready for notice in stage.notices)

    def _greet(self, hello: WorkerHello) -> None:
        if hello.worker in self._workers:
            raise ProtocolError(f"worker {hello.worker} greeted twice")
        if hello.version != __version__:
            raise ConfigurationError(
                f"worker {hello.worker} on {hello.host} runs sgl_pipeline {hello.version}, the "
                f"scheduler {__version__}; install the same version on every host"
            )
        self._workers[hello.worker] = Worker(hello)

    def _what_follows(self) -> Iterator[Addressed]:
        if self.plan is None:
            yield from self._measure_or_plan()
        if self.plan is not None:
            yield from self._fill_stages(self.plan)
            yield from self._size_pools()

    def _measure_or_plan(self) -> Iterator[Addressed]:
        """Asks the first workers, as many as there are stages, for costs; plans by them."""
        alive = (n for n, worker in self._workers.items() if worker.phase is not WorkerPhase.LOST)
        first = sorted(alive)[: self._num_stages]
        if len(first) < self._num_stages:
            return
        workers = [self._workers[number] for number in first]
        if all(worker.costs is not None for worker in workers):
            self._plan_by_time([worker.costs for worker in workers if worker.costs is not None])
            return
        steps = (TYPICAL_STEP,) if self._predictor is None else ()
        even = StagePlan(0, even_layer_counts(self._num_layers, self._num_stages))
        assignments = assign([worker.hello for worker in workers], even, self._args)
        for number, assignment in zip(first, assignments, strict=True):
            worker = self._workers[number]
            if worker.phase is WorkerPhase.GREETED and worker.costs is None:
                worker.phase = WorkerPhase.MEASURING
                yield number, MeasureCosts(assignment, steps)

    def _plan_by_time(self, found: list[PartCosts]) -> None:
        """The plan whose slowest stage takes least, of those that fit the stages' memory."""
        stages = self._args.stages
        if self._predictor is not None:
            costs = (predicted_costs(self._predictor, TYPICAL_STEP.work),) * self._num_stages
        else:
            measured = [StageCosts.of(own.kinds, own.samples[0]) for own in found]
            costs = agreed_costs(measured, are_alike=stages.device == "cpu")
        memory_bytes = [own.memory_bytes for own in found]
        fits = fits_in(found[0].sizes, memory_bytes, stages.max_total_tokens or 0)
        counts = balanced_layer_counts(costs, fits)
        even = even_layer_counts(self._num_layers, self._num_stages)
        self.plan = StagePlan(0, counts)
        self.predicted_ms = stage_times_ms(costs, counts)
        logger.info(
            "layer split %s: %s should take the stages %s ms, %.2f of it for the head; the slowest "
            "of an even split %.2f ms",
            ",".join(map(str, counts)),
            TYPICAL_STEP,
            ", ".join(f"{stage_ms:.2f}" for stage_ms in self.predicted_ms),
            costs[-1].head_ms,
            max(stage_times_ms(costs, even)),
        )

    def _fill_stages(self, plan: StagePlan) -> Iterator[Addressed]:
        """Gives the stages without a worker to workers without a stage, the first to the first; not
        before each stage has had one."""
        newcomers = dict(zip(self.vacant_stages, sorted(self.spare_workers), strict=False))
        hellos = self._hellos | {
            stage: self._workers[number].hello for stage, number in newcomers.items()
        }
        if not newcomers or len(hellos) < self._num_stages:
            return
        self._hellos = hellos
        self._first_plan = self._first_plan or plan
        assignments = assign(
            [hellos[stage] for stage in range(self._num_stages)],
            plan,
            self._args,
            first_plan=self._first_plan,
            incarnation=self.incarnation,
        )
        for stage, number in newcomers.items():
            worker = self._workers[number]
            worker.stage, worker.phase = stage, WorkerPhase.ASSIGNED
            worker.asked_incarnation = self.incarnation
            yield number, assignments[stage]

    def _regroup_ready(self) -> Iterator[Addressed]:
        """Tells ready workers to join the stream of `incarnation`, each once. One that is still to
        get ready is told when it is: its links are of the stream that it was assigned for."""
        if self.plan is None:
            return
        hellos = [self._hellos[stage] for stage in sorted(self._hellos)]
        links = link_addresses(self._args, hellos, self.incarnation)
        for number, worker in self._workers.items():
            is_ready = worker.phase is WorkerPhase.READY
            if is_ready and worker.asked_incarnation < self.incarnation:
                worker.asked_incarnation = self.incarnation
                yield number, Regroup(self.incarnation, self.plan, links)

    def _size_pools(self) -> Iterator[Addressed]:
        """Says how many pages all stages use, which the first full set of workers decides."""
        loaded = {
            number: worker.loaded
            for number, worker in self._workers.items()
            if worker.phase is WorkerPhase.LOADED and worker.loaded is not None
        }
        if self.num_pages is None:
            if len(loaded) < self._num_stages:
                return
            self.num_pages = min(report.num_pages for report in loaded.values())
        for number, report in loaded.items():
            if report.num_pages < self.num_pages:
                raise ConfigurationError(
                    f"worker {number} has room for {report.num_pages} KV pages of stage "
                    f"{report.stage}, the pipeline uses {self.num_pages}; lower --max-total-tokens"
                )
            self._workers[number].phase = WorkerPhase.SIZED
            yield number, PoolSize(self.num_pages)

    def _filling(self, stage: int) -> Worker | None:
        """The worker that fills `stage`, if any does."""
        return next((one for one in self._workers.values() if one.stage == stage), None)

    @staticmethod
    def _expect(worker: Worker | None, phase: WorkerPhase, message: FromWorker) -> Worker:
        """`worker`, which must be in `phase` to send `message`."""
        if worker is None or worker.phase is not phase:
            found = "unknown" if worker is None else worker.phase.name.lower()
            raise ProtocolError(
                f"{type(message).__name__} arrived from a worker that is {found}; "
                f"{phase.name.lower()} was due"
            )
        return worker
