"""The workers of one pipeline: their stages and their progress.

The workers' messages come in, and the answers go out. A worker may come at any time, and each goes
its own way: greeted, measured where layers are split by time, assigned, loaded, ready. Does no I/O.
"""

from collections.abc import Container, Iterable, Iterator, Mapping

from sgl_pipeline import __version__
from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.errors import ConfigurationError, ProtocolError
from sgl_pipeline.layer_partition import parse_layer_partition
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.pipeline.assignment import assign, link_addresses, page_links, place_newcomers
from sgl_pipeline.pipeline.cost_survey import CostSurvey
from sgl_pipeline.pipeline.known_worker import Worker, WorkerPhase, expect
from sgl_pipeline.pipeline.pipeline_capacity import PipelineCapacity
from sgl_pipeline.pipeline.stage_workers import StageWorkers
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import (
    FromWorker,
    MeasuredCosts,
    PoolSize,
    Regroup,
    Regrouped,
    Shutdown,
    StageAssignment,
    StageLoaded,
    StageReady,
    ToWorker,
    WorkerHello,
)

# A message and the worker that it is for.
Addressed = tuple[int, ToWorker]


class WorkerRoster(StageWorkers):
    """`plan`, `num_pages`, and `log_pages` (pages that fit into each stage's log) are None until
    they are decided; they hold for later workers too, until the workers are given other stages
    (`reassign`). Stages join the stream of `incarnation` now; there are `num_stages`.

    Args:
        num_layers: of the model.
        predictor: of its parts' times on each of the workers; None: they time a typical step.

    Raises ConfigurationError when the model cannot be split as `args` asks.
    """

    def __init__(
        self, args: PipelineArgs, num_layers: int, predictor: StepPredictor | None = None
    ) -> None:
        super().__init__(args.stages.num_stages)
        self._args = args
        self._survey = CostSurvey(args, num_layers, predictor)
        self.plan = parse_layer_partition(args.stages.layer_partition, self.num_stages, num_layers)
        self.predicted_ms: tuple[float, ...] | None = None
        self.num_pages: int | None = None
        self.num_state_slots = 0
        self.log_pages: int | None = None
        self.incarnation = self._newest_incarnation = 0
        # Of these stages, before any layer moved between them.
        self._first_plan = self.plan
        # Of the newest worker of each stage, even if it was lost.
        self._hellos: dict[int, WorkerHello] = {}

    @property
    def can_regroup(self) -> bool:
        """True if stages that run can be joined anew: NCCL's processes are joined for life."""
        hellos = [self._hellos[stage] for stage in sorted(self._hellos)]
        return not any(link.startswith("nccl") for link in link_addresses(self._args, hellos))

    @property
    def max_layers(self) -> tuple[int, ...]:
        """The most layers that each stage may hold at once."""
        assert self._first_plan is not None
        return self._args.migration.max_layers(self._first_plan)

    @property
    def unfit_workers(self) -> list[tuple[int, str]]:
        """Workers that have loaded and have less room than the pages that the others use, and the
        reason to report for each."""
        return [
            (
                number,
                f"it has room for {self._sizes(worker.loaded)} of stage {worker.stage}, the "
                f"pipeline uses {self._sizes(self)}; lower --max-total-tokens",
            )
            for number, worker in self._loaded_workers()
            if worker.loaded is not None and not self._has_room(worker.loaded)
        ]

    def _sizes(self, pools: "StageLoaded | WorkerRoster") -> str:
        """The sizes of both pools in words, of that of pages alone where there are no states."""
        slots = f" and {pools.num_state_slots} state slots" if self.num_state_slots else ""
        return f"{pools.num_pages} KV pages{slots}"

    @property
    def has_regrouped(self) -> bool:
        """True if all stages that were not lost are ready for the stream of `incarnation`."""
        return all(
            one.incarnation == self.incarnation
            for one in self._workers.values()
            if one.phase is WorkerPhase.READY and not one.is_successor
        )

    @property
    def is_complete(self) -> bool:
        """True if every stage has a worker that is ready for the stream of `incarnation`."""
        filling = [one for one in self._workers.values() if one.filled_stage is not None]
        is_ready = [one.phase is WorkerPhase.READY for one in filling]
        return len(is_ready) == self.num_stages and all(is_ready) and self.has_regrouped

    def take(self, message: FromWorker, speaker: int | None = None) -> list[Addressed]:
        """Applies a worker's message on its way to readiness; returns the messages that follow.

        Args:
            speaker: the worker; None: the worker of the message's stage.

        Raises ConfigurationError if the workers cannot run the requested pipeline, and
        ProtocolError for a message that is not the worker's next.
        """
        if isinstance(message, WorkerHello):
            self._greet(message)
        elif isinstance(message, MeasuredCosts):
            expect(self._workers.get(message.worker), message).take_costs(message)
        elif isinstance(message, StageLoaded):
            self._expect(speaker, message).take_loaded(message)
        elif isinstance(message, StageReady):
            worker = self._expect(speaker, message)
            self._check_log(message)
            worker.take_ready(message)
        elif isinstance(message, Regrouped):
            self._expect(speaker, message).take_regrouped(message)
        else:
            raise ProtocolError(f"a worker that is not ready sent {type(message).__name__}")
        return list(self._what_follows())

    def _expect(self, speaker: int | None, message: StageLoaded | StageReady | Regrouped) -> Worker:
        """The sender of `message`, which is due. Raises ProtocolError otherwise."""
        filling = self._filling(message.stage)
        return expect(filling if speaker is None else self._workers.get(speaker), message)

    def lose(self, number: int) -> int | None:
        """The worker has ended. Returns the stage that it filled, if any, which is its successor's
        now, or vacant."""
        worker = self._workers.get(number)
        if worker is None:
            return None
        stage = worker.lose()
        if stage is not None and (successor := self.successor_of(stage)) is not None:
            self._succeed(stage, successor)
        return stage

    # A stage whose worker leaves

    def give_successor(self, stage: int, plan: StagePlan) -> list[Addressed]:
        """Makes a spare load `stage`, with its layers in `plan`, while another worker fills it;
        returns the messages to it, none if there is no spare. Its links are of a stream that no
        other worker joins: it regroups with the others when it takes over."""
        spares = {number: self._workers[number].hello for number in self.spare_workers}
        number = place_newcomers([stage], spares, self._hellos).get(stage)
        if number is None:
            return []
        incarnation = self.next_incarnation()
        hellos = self._hellos | {stage: spares[number]}
        assignment = self._assign(hellos, plan, incarnation, newcomers=[stage])[stage]
        worker = self._workers[number]
        worker.give_stage(assignment, incarnation)
        worker.is_successor = True
        return [(number, assignment)]

    def page_link(self, stage: int) -> str:
        """The address at which the worker of `stage` and its successor meet to hand over KV
        pages."""
        successor = self.successor_of(stage)
        assert successor is not None
        hellos = [self._hellos[stage], self._workers[successor].hello]
        return page_links(self._args, hellos, 0)[1]

    def hand_over(self, stage: int) -> int:
        """The successor fills `stage` from now on; returns its former worker, whose messages no
        longer count."""
        leaver = self.worker_of(stage)
        assert leaver is not None and self.successor_of(stage) is not None
        self.lose(leaver)
        return leaver

    def _succeed(self, stage: int, successor: int) -> None:
        self._workers[successor].succeed()
        self._hellos[stage] = self._workers[successor].hello

    def _dismiss_successors(self) -> Iterator[Addressed]:
        for number, worker in self._workers.items():
            if worker.is_successor:
                worker.lose()
                yield number, Shutdown()

    # All stages anew

    def next_incarnation(self) -> int:
        """The next unused number of a stream of orders."""
        self._newest_incarnation = max(self._newest_incarnation, self.incarnation) + 1
        return self._newest_incarnation

    def regroup(self, plan: StagePlan, incarnation: int) -> None:
        """The stages must join each other anew, under `plan`, for the stream of `incarnation`:
        `fill` returns the messages to each."""
        self.plan, self.incarnation = plan, incarnation

    def layer_counts(self, num_stages: int) -> tuple[int, ...]:
        """The split over the workers to which `reassign` would give `num_stages` stages."""
        chosen = [self._workers[number] for number in self._candidates[:num_stages]]
        return self._survey.layer_counts(chosen, self._workers.values())

    def reassign(self, plan: StagePlan, incarnation: int) -> list[Addressed]:
        """Gives the stages of `plan`, more or fewer than before, to the workers that fill one, in
        their order, and then to spares; returns the messages to each. All have settled.

        A worker that fills a stage keeps the weights of layers that the new one has too. The number
        of pages is decided anew. Successors end: the stages that they have loaded no longer exist.
        """
        assert self.is_settled and plan.num_stages <= len(self._candidates)
        dismissed = [*self._dismiss_successors()]
        workers = self._candidates[: plan.num_stages]
        self.plan = self._first_plan = plan
        self.num_stages, self.incarnation = plan.num_stages, incarnation
        self.num_pages = self.log_pages = None
        self.predicted_ms = None
        self._hellos = {stage: self._workers[number].hello for stage, number in enumerate(workers)}
        assignments = assign(
            [self._hellos[stage] for stage in range(plan.num_stages)],
            plan,
            self._args,
            incarnation=incarnation,
            fewer_pages_do=True,
            gpus=[self._workers[number].gpu for number in workers],
        )
        for number, assignment in zip(workers, assignments, strict=True):
            self._workers[number].give_stage(assignment, self.incarnation)
        return [*dismissed, *zip(workers, assignments, strict=True)]

    @property
    def _candidates(self) -> list[int]:
        """The workers that can be given a stage."""
        return [*self.workers_of_stages, *sorted(self.spare_workers)]

    def fill(self) -> list[Addressed]:
        """The messages to workers now, besides answers to theirs."""
        return [*self._regroup_ready(), *self._what_follows()]

    def capacity(self) -> PipelineCapacity | None:
        """The pipeline, once a ready worker fills every stage."""
        workers = [self._filling(stage) for stage in range(self.num_stages)]
        loaded = tuple(worker.loaded for worker in workers if worker and worker.loaded)
        ready = [worker.ready for worker in workers if worker and worker.ready]
        if self.plan is None or self.num_pages is None or len(ready) < self.num_stages:
            return None
        return PipelineCapacity(
            self.plan,
            self.predicted_ms,
            self.num_pages,
            loaded,
            ready[0].attention_backend,
            ready[0].layer_kernels,
            sum(stage.page_bytes for stage in loaded)
            // sum(self._args.migration.max_layers(self.plan)),
            self.log_pages or 0,
            self.num_state_slots,
        )

    def notices(self) -> Iterable[str]:
        """The stages' notices to the user, each once."""
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
        wanted = self._args.stages.transformers_version
        if wanted is not None and hello.transformers != wanted:
            raise ConfigurationError(
                f"worker {hello.worker} on {hello.host} has transformers "
                f"{hello.transformers or '(none)'}, the launcher probed this model with {wanted}: "
                "their code of its layers may differ; install the same version on every host"
            )
        self._workers[hello.worker] = Worker(hello)

    def _what_follows(self) -> Iterator[Addressed]:
        if self.plan is None:
            found = self._survey.plan(self._workers)
            if found is None:
                yield from self._survey.next_orders(self._workers)
            else:
                self.plan, self.predicted_ms = found
        if self.plan is not None:
            yield from self._fill_stages(self.plan)
            yield from self._size_pools()

    def _fill_stages(self, plan: StagePlan) -> Iterator[Addressed]:
        """Gives vacant stages to workers without a stage, in order; not before each stage has had a
        worker."""
        spares = {number: self._workers[number].hello for number in self.spare_workers}
        newcomers = place_newcomers(self.vacant_stages, spares, self._hellos)
        hellos = self._hellos | {stage: spares[number] for stage, number in newcomers.items()}
        if not newcomers or len(hellos) < self.num_stages:
            return
        if any(self._hellos[s].host_key != hellos[s].host_key for s in self._hellos):
            # Other workers have addresses of that stage on another host.
            self.incarnation = self.next_incarnation()
        self._hellos = hellos
        self._first_plan = self._first_plan or plan
        assignments = self._assign(hellos, plan, self.incarnation, newcomers)
        for stage, number in newcomers.items():
            self._workers[number].give_stage(assignments[stage], self.incarnation)
            yield number, assignments[stage]

    def _assign(
        self,
        hellos: Mapping[int, WorkerHello],
        plan: StagePlan,
        incarnation: int,
        newcomers: Container[int],
    ) -> tuple[StageAssignment, ...]:
        """The assignment of each stage's worker. The stages `newcomers` get theirs now."""
        stages = range(self.num_stages)
        return assign(
            [hellos[stage] for stage in stages],
            plan,
            self._args,
            first_plan=self._first_plan,
            incarnation=incarnation,
            fewer_pages_do=incarnation > 0,
            gpus=[None if stage in newcomers else self._gpu_of(stage) for stage in stages],
        )

    def _regroup_ready(self) -> Iterator[Addressed]:
        """Orders ready workers to join the stream of `incarnation`, each once. A worker that is not
        ready yet gets the order when it is: its links are of the stream that it was assigned
        for."""
        if self.plan is None:
            return
        hellos = [self._hellos[stage] for stage in sorted(self._hellos)]
        links = link_addresses(self._args, hellos, self.incarnation)
        for number, worker in self._workers.items():
            is_ready = worker.phase is WorkerPhase.READY and not worker.is_successor
            if is_ready and worker.asked_incarnation < self.incarnation:
                assert worker.stage is not None
                worker.asked_incarnation = self.incarnation
                pages = page_links(self._args, hellos, worker.stage)
                yield number, Regroup(self.incarnation, self.plan, links, pages)

    def _size_pools(self) -> Iterator[Addressed]:
        """Sends the number of pages that all stages use, which the first full set of workers
        decides."""
        loaded = self._loaded_workers()
        if self.num_pages is None:
            if len(loaded) < self.num_stages:
                return
            self.num_pages = min(one.loaded.num_pages for _, one in loaded if one.loaded)
            self.num_state_slots = min(
                one.loaded.num_state_slots for _, one in loaded if one.loaded
            )
        for number, worker in loaded:
            if worker.loaded is not None and self._has_room(worker.loaded):
                worker.phase = WorkerPhase.SIZED
                yield number, PoolSize(self.num_pages, self.num_state_slots)

    def _has_room(self, loaded: StageLoaded) -> bool:
        """True if the stage has room for the pages and slots that all use, if these are known."""
        return self.num_pages is None or (
            loaded.num_pages >= self.num_pages and loaded.num_state_slots >= self.num_state_slots
        )

    def _check_log(self, ready: StageReady) -> None:
        """All logs have the same room: the scheduler keeps one book for them."""
        self.log_pages = ready.log_pages if self.log_pages is None else self.log_pages
        if ready.log_pages != self.log_pages:
            raise ProtocolError(
                f"stage {ready.stage} keeps the rows of {ready.log_pages} pages, others of "
                f"{self.log_pages}"
            )
