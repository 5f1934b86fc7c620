"""The scheduler's hands on its workers: their channel, their processes, who is asked for new ones.

Called by the scheduler process. What a worker is told on its way to readiness is decided by
`pipeline/worker_roster.py`; this file carries it, and notices when a worker ends.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence

import zmq

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.channels import SchedulerChannel
from sgl_pipeline.errors import ConfigurationError, StageFailure
from sgl_pipeline.managers.stages.stage_processes import stage_address
from sgl_pipeline.messages import FromWorker, Shutdown, ToWorker, WorkerFailed
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.pipeline.worker_roster import PipelineCapacity, WorkerRoster
from sgl_pipeline.pipeline.worker_source import WorkerSource
from sgl_pipeline.process_lifetime import WatchedProcess

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2.0
POLL_MS = 200  # bound on how late a worker's end is noticed during the start


class StageLauncher:
    """The workers of one server.

    Args:
        num_layers: of the model.
        pids: of the workers that have been started, by number.
        source: who can be asked for more; None: nobody.
        predictor: of the parts' times on each worker, where that is known.
    """

    def __init__(
        self,
        args: PipelineArgs,
        num_layers: int,
        pids: Sequence[int],
        context: "zmq.Context[zmq.Socket[bytes]]",
        source: WorkerSource | None = None,
        predictor: StepPredictor | None = None,
    ) -> None:
        self.roster = WorkerRoster(args, num_layers, predictor)
        self.channel = SchedulerChannel(context, stage_address(args.run_directory))
        self._source = source
        self._num_stages = args.stages.num_stages
        self._processes = {worker: WatchedProcess(pid) for worker, pid in enumerate(pids)}
        self._num_workers = len(pids)
        self._failures: dict[int, WorkerFailed] = {}

    @property
    def stages(self) -> range:
        return range(self._num_stages)

    def start(self) -> PipelineCapacity:
        """Returns once a worker that is ready to take orders fills every stage.

        Raises ConfigurationError for what a flag can mend, StageFailure for anything else.
        """
        while (capacity := self.roster.capacity()) is None:
            if not self.channel.socket.poll(POLL_MS):
                self.check({})
            for message in self.receive():
                self.take(message)
            if self._failures:
                self.check({})
        for notice in self.roster.notices():
            logger.warning("%s", notice)
        return capacity

    def take(self, message: FromWorker) -> None:
        """Books what a worker says on its way to readiness, and sends what follows from it.

        Raises ProtocolError and ConfigurationError as `WorkerRoster.take`.
        """
        for worker, answer in self.roster.take(message):
            self.channel.send(worker, answer)

    def send(self, stage: int, message: ToWorker) -> None:
        """Queues `message` for the worker that fills `stage`; every stage has one."""
        self.channel.send(self.roster.workers_of_stages[stage], message)

    def broadcast(self, message: ToWorker) -> None:
        """Queues `message`, encoded once, for the workers of all stages."""
        self.channel.broadcast(self.roster.workers_of_stages, message)

    def ask_for_worker(self) -> int:
        """Asks the source for a worker; returns the number that it will greet with.

        Raises StageFailure where nobody can be asked.
        """
        worker = self._num_workers
        if self._source is None:
            raise StageFailure(worker, None, "no source of workers to ask for a new one")
        self._num_workers += 1
        self._source.start_worker(worker)
        return worker

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
                stage = self.roster.stage_of(worker)
                raise ConfigurationError(f"stage {stage}: {failure.message}")
            raise self._stage_failure(worker, last_steps, failure.message)
        for worker, pid in self._source.started() if self._source is not None else ():
            self._processes[worker] = WatchedProcess(pid)
        for worker, process in self._processes.items():
            if process.wait(timeout_s=0):
                # What it said before it ended explains more than its exit code.
                for _ in self.receive():
                    pass
                if worker in self._failures:
                    return self.check(last_steps)
                raise self._stage_failure(worker, last_steps, process.end())
        return None

    def _stage_failure(
        self, worker: int, last_steps: Mapping[int, int], reason: str
    ) -> StageFailure:
        stage = self.roster.stage_of(worker)
        return StageFailure(stage, last_steps.get(stage), reason)

    def stop(self) -> None:
        """Ends all workers: asks, waits a moment, kills. To be called once, at any time."""
        for worker in self._processes:
            self.channel.send(worker, Shutdown())
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes.values():
            if not process.wait(max(0.0, deadline - time.monotonic())):
                process.kill()
            process.close()
        self._processes.clear()
        self.channel.close()
