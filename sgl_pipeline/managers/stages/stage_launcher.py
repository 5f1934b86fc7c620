"""The scheduler's access to its workers: their channel, and the source of new ones.

It runs in the scheduler process. `pipeline/worker_roster.py` decides the messages to a worker on
its way to readiness; this module sends them, and notices when a worker ends
(`worker_processes.py`).
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import zmq

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.errors import ConfigurationError, PipelineLost, StageFailure, WorkerFault
from sgl_pipeline.managers.stages.load_line import LoadLine
from sgl_pipeline.managers.stages.stage_processes import stage_address
from sgl_pipeline.managers.stages.start_losses import StartLosses
from sgl_pipeline.managers.stages.worker_processes import WorkerProcesses
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.pipeline.join_watch import JoinWatch
from sgl_pipeline.pipeline.pipeline_capacity import PipelineCapacity
from sgl_pipeline.pipeline.worker_roster import Addressed, WorkerRoster
from sgl_pipeline.pipeline.worker_source import RefusedWorker, WorkerSource
from sgl_pipeline.pipeline.worker_words import check_speaker
from sgl_pipeline.wire.channels import OtherHosts, SchedulerChannel
from sgl_pipeline.wire.stage_messages import (
    FromWorker,
    MeasureCosts,
    PoolSize,
    Shutdown,
    StageAssignment,
    StageLoaded,
    StillLoading,
    ToWorker,
    WorkerFailed,
    WorkerLeaves,
)

logger = logging.getLogger(__name__)

POLL_MS = 200  # bound on how late a worker's end is noticed during the start


class StageLauncher:
    """The workers of one server.

    Args:
        num_layers: of the model.
        pids: of the workers that have been started, by number.
        source: the source of more workers; None: no source.
        predictor: of the parts' times on each worker, if known.
        others: workers of other hosts, if any.
    """

    def __init__(
        self,
        args: PipelineArgs,
        num_layers: int,
        pids: Sequence[int],
        context: "zmq.Context[zmq.Socket[bytes]]",
        source: WorkerSource | None = None,
        predictor: StepPredictor | None = None,
        others: OtherHosts | None = None,
    ) -> None:
        self.roster = WorkerRoster(args, num_layers, predictor)
        self.channel = SchedulerChannel(context, stage_address(args.run_directory), others)
        self._others = others
        self._join_limit_s = args.recovery.join_limit_s
        self._joins = JoinWatch(
            args.recovery.silence_s, self._join_limit_s, self._worker_core_waits_s
        )
        self._source = source
        self._processes = WorkerProcesses(pids)
        # The first workers have the numbers of their stages, on every host.
        self._num_workers = max(len(pids), args.stages.num_stages)
        self._arrived: deque[tuple[int, FromWorker]] = deque()
        self._failures: dict[int, WorkerFailed] = {}
        self._lost: set[int] = set()
        self._asked: set[int] = set()
        self._refused: list[RefusedWorker] = []
        self._has_started = False
        self._load_line = LoadLine(num_layers)

    @property
    def stages(self) -> range:
        return range(self.roster.num_stages)

    def start(self) -> PipelineCapacity:
        """Returns once a worker that is ready to take orders fills every stage. If workers were
        lost with their host and have been replaced, the roster's incarnation is not the first.

        Raises ConfigurationError for what a flag can fix, StageFailure for anything else.
        """
        try:
            capacity = self._await_capacity()
        finally:
            self._load_line.close()
        for notice in self.roster.notices():
            logger.warning("%s", notice)
        self._has_started = True
        return capacity

    def _await_capacity(self) -> PipelineCapacity:
        losses = StartLosses(self._join_limit_s)
        while (capacity := self.roster.capacity()) is None or not self.roster.has_regrouped:
            if not self.channel.wait(POLL_MS):
                self._check_start(losses)
            for worker, message in self.receive():
                if isinstance(message, WorkerLeaves):
                    self.blame(worker, "it was asked to leave before the server was ready")
                    continue
                self.take(message)
                if self.roster.incarnation > 0:
                    self.tell(self.roster.fill())
            if self._failures:
                self._check_start(losses)
        return capacity

    def _check_start(self, losses: StartLosses) -> None:
        """Requests replacements for workers lost with their host once the host returns. Raises
        StageFailure for any other loss, and if the stages' links cannot be rejoined, and
        ConfigurationError as `take_lost` and if a host does not come back.
        """
        now_s = time.monotonic()
        lost_stages: list[tuple[int, str]] = []
        for worker, reason in self.take_lost():
            if self._source is None or not self._source.is_lost_with_host(worker):
                raise StageFailure(self.roster.stage_of(worker), None, reason)
            losses.add(reason, now_s)
            if (stage := self.roster.lose(worker)) is not None:
                lost_stages.append((stage, reason))
        if (plan := self.roster.plan) is not None and lost_stages:
            if not self.roster.can_regroup:
                stage, reason = lost_stages[0]
                raise StageFailure(stage, None, f"{reason}; stages that NCCL joins cannot wait")
            self.roster.regroup(plan, self.roster.incarnation + 1)
            self.tell(self.roster.fill())
        for worker, reason in (*self.roster.unfit_workers, *self.silent_newcomers(now_s)):
            if worker in self._asked:
                raise StageFailure(self.roster.stage_of(worker), None, reason)
        are_hosts_there = self._source is None or self._source.are_hosts_there()
        for _ in range(losses.num_wanted(are_hosts_there, now_s)):
            self.ask_for_worker()

    def take(self, message: FromWorker) -> None:
        """Applies a worker's message on its way to readiness, and sends the messages that follow.

        Raises ProtocolError and ConfigurationError as `WorkerRoster.take`.
        """
        self.tell(self.roster.take(message))

    def tell(self, messages: Iterable[Addressed]) -> None:
        """Sends each worker its messages on the way to readiness, or the order to end."""
        for worker, message in messages:
            if isinstance(message, Shutdown):
                self._dismiss(worker)
                continue
            if isinstance(message, MeasureCosts | StageAssignment | PoolSize):
                self._joins.asked(worker, "load", time.monotonic())
            self.channel.send(worker, message)

    def silent_newcomers(self, now_s: float) -> list[tuple[int, str]]:
        """Workers that start or load, and have been silent for too long."""
        return [*self._joins.silent_workers(now_s)]

    def send(self, stage: int, message: ToWorker) -> None:
        """Queues `message` for the worker that fills `stage`, if one does."""
        worker = self.roster.worker_of(stage)
        if worker is not None:
            self.channel.send(worker, message)

    def broadcast(self, message: ToWorker) -> None:
        """Queues `message`, encoded once, for the workers of all stages."""
        self.channel.broadcast(self.roster.workers_of_stages, message)

    @property
    def has_vacant_stage(self) -> bool:
        """True if a stage is being replaced, and its worker is not ready."""
        return not self.roster.is_complete

    @property
    def stage_pids(self) -> list[int | None]:
        """The process of each stage; None if it will be replaced."""
        workers = map(self.roster.worker_of, self.stages)
        processes = [None if worker is None else self._processes.get(worker) for worker in workers]
        return [None if process is None else process.pid for process in processes]

    def core_waits_s(self, stage: int) -> Mapping[int, float]:
        """See `WatchedProcess.core_waits_s`, of the worker that fills `stage`."""
        worker = self.roster.worker_of(stage)
        return {} if worker is None else self._worker_core_waits_s(worker)

    def _worker_core_waits_s(self, worker: int) -> Mapping[int, float]:
        process = self._processes.get(worker)
        return {} if process is None else process.core_waits_s()

    def clock_offsets_s(self) -> dict[int, float]:
        """For stages on another clock than this host's: seconds to add to their moments."""
        offsets_s = {} if self._source is None else self._source.clock_offsets_s()
        stages = ((self.roster.worker_stage(worker), worker) for worker in offsets_s)
        return {stage: offsets_s[worker] for stage, worker in stages if stage is not None}

    def hosts(self) -> list[dict[str, Any]]:
        """The hosts that workers come from, if there are several; JSON types only."""
        return [] if self._source is None else self._source.hosts()

    def ask_for_worker(self) -> int:
        """Asks the source for a worker; returns the number that it will greet with.

        Raises StageFailure if there is no source.
        """
        worker = self._num_workers
        if self._source is None:
            raise StageFailure(worker, None, "no source of workers to ask for a new one")
        self._num_workers += 1
        self._asked.add(worker)
        self._source.start_worker(worker)
        self._joins.asked(worker, "start", time.monotonic())
        return worker

    def receive(self) -> Iterator[tuple[int, FromWorker]]:
        """Messages that have arrived, each with its worker, except messages of lost or faulty
        workers. A WorkerFailed is kept as the reason for `take_lost`."""
        self._gather()
        while self._arrived:
            worker, message = self._arrived.popleft()
            if worker in self._lost or worker in self._failures:
                continue
            try:
                check_speaker(self.roster, worker, message)
            except WorkerFault as fault:
                self.blame(worker, fault.reason)
                continue
            is_done = not isinstance(message, StillLoading)
            self._joins.heard(worker, time.monotonic(), is_done)
            self._show_progress(worker, message)
            if is_done:
                yield worker, message

    def _show_progress(self, worker: int, message: FromWorker) -> None:
        """Shows the progress of the first workers only: while the server runs the terminal is not
        ours."""
        stage = self.roster.worker_stage(worker)
        if self._has_started or stage is None or self.roster.plan is None:
            return
        if isinstance(message, StillLoading):
            self._load_line.heard(stage, message.num_layers)
        elif isinstance(message, StageLoaded):
            self._load_line.heard(stage, self.roster.plan.layer_counts[stage])

    def blame(self, worker: int, reason: str) -> None:
        """A worker has sent an invalid message: `take_lost` will return it."""
        self._failures.setdefault(worker, WorkerFailed(worker, reason, False))

    def check(self, last_steps: Mapping[int, int]) -> None:
        """Raises StageFailure when a worker has failed or ended, and ConfigurationError as
        `take_lost`.

        Args:
            last_steps: the last step that each stage reported, for the message.
        """
        for worker, reason in self.take_lost():
            stage = self.roster.stage_of(worker)
            raise StageFailure(stage, last_steps.get(stage), reason)

    def take_lost(self) -> Iterator[tuple[int, str]]:
        """The workers that have failed or ended since the last call, and the known cause. Their
        processes are certainly ended, and their messages forgotten. Raises ConfigurationError if
        the user can fix it, and PipelineLost if a stage cannot take over the layers of others.
        """
        self._take_started()
        for worker in self._processes.done():
            self.give_up(worker)
        ended = self._processes.ended()
        if ended:
            # A worker's last message explains more than its exit code. Otherwise messages that have
            # arrived stay in the channel, whose socket wakes the loop.
            self._gather()
        for worker, reason in self._others.take_broken().items() if self._others else ():
            self._failures.setdefault(worker, WorkerFailed(worker, reason, False))
        for worker in {**self._failures, **dict.fromkeys(ended)}:
            failure = self._failures.pop(worker, None)
            if failure is not None and failure.is_configuration:
                self._require_one_of_many(worker, failure.message)
            if worker not in self._lost:
                reason = ended[worker].end() if failure is None else failure.message
                self.give_up(worker)
                yield worker, reason

    def take_leavers(self) -> list[int]:
        """Workers that must leave with their host, since the last call."""
        leavers = [] if self._source is None else self._source.take_leavers()
        return [worker for worker in leavers if worker not in self._lost]

    def take_refused(self) -> list[RefusedWorker]:
        """The workers that the source cannot give, since the last call; after `take_lost`."""
        refused, self._refused = self._refused, []
        return refused

    def _take_started(self) -> None:
        """Watches the processes of workers that were asked for."""
        for answer in self._source.started() if self._source is not None else ():
            worker = answer.worker
            if isinstance(answer, RefusedWorker):
                self._lost.add(worker)
                self._joins.forget(worker)
                self._refused.append(answer)
                continue
            try:
                assert self._source is not None
                process = self._source.watch(answer)
            except ProcessLookupError:
                self._failures[worker] = WorkerFailed(worker, "its process ended", False)
                continue
            if worker in self._lost:  # it took too long to start
                process.kill()
                process.close()
                continue
            self._processes.watch(worker, process)

    def _require_one_of_many(self, worker: int, message: str) -> None:
        """A newcomer that does not fit may be followed by one that does; the first workers may
        not."""
        text = f"stage {self.roster.stage_of(worker)}: {message}"
        if not self._has_started:
            raise ConfigurationError(text)
        if self.roster.has_served(worker):
            raise PipelineLost(text)

    @property
    def ends_descriptor(self) -> int:
        """A file descriptor that can be read while `take_lost` has a process that has ended."""
        return self._processes.fileno()

    def ask_for_dump(self, worker: int) -> str:
        """Makes a worker write the stacks of its threads into the log, if it can; returns its state
        according to the kernel."""
        process = self._processes.get(worker)
        if process is None:
            return "gone"
        process.ask_for_dump()
        return process.state()

    def give_up(self, worker: int) -> None:
        """Ends a worker on any host: its messages no longer count."""
        self._lost.add(worker)
        self._joins.forget(worker)
        if self._others is not None:
            self._others.forget(worker)
        if self._source is not None:
            self._source.forget(worker, has_served=self.roster.has_served(worker))
        self._processes.kill(worker)

    def _dismiss(self, worker: int) -> None:
        """Lets a worker end that is not needed any more; its messages no longer count."""
        self.channel.send(worker, Shutdown())
        self._lost.add(worker)
        self._joins.forget(worker)
        self._processes.dismiss(worker)

    def _gather(self) -> None:
        """Takes the messages that have arrived from the channel."""
        while True:
            try:
                received = self.channel.receive()
            except WorkerFault as fault:
                self.blame(fault.worker, fault.reason)
                continue
            if received is None:
                return
            worker, message = received
            if isinstance(message, WorkerFailed):
                self._failures.setdefault(worker, message)
            else:
                self._arrived.append(received)

    def stop(self) -> None:
        """Ends all workers: asks, waits a moment, kills. To be called once, at any time."""
        for worker in self._processes.numbers:
            self.channel.send(worker, Shutdown())
        self._processes.end_all()
        self.channel.close()
