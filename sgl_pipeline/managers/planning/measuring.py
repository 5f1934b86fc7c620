"""Lets one stage worker time made-up steps, without a server around it.

The worker is a process like any stage's, with the cores and threads that the first of `--pp` stages
would have.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import zmq

from sgl_pipeline.args import PipelineArgs, SchedulingArgs, StageArgs
from sgl_pipeline.costs.stage_costs import MadeUpStep, PartCosts
from sgl_pipeline.errors import ConfigurationError, StageFailure
from sgl_pipeline.layer_partition import even_layer_counts
from sgl_pipeline.managers.stages.stage_processes import (
    StageProcesses,
    stage_address,
    stage_threads,
)
from sgl_pipeline.pipeline.assignment import assign
from sgl_pipeline.process_lifetime import WatchedProcess
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.channels import SchedulerChannel
from sgl_pipeline.wire.stage_messages import (
    FromWorker,
    MeasureCosts,
    MeasuredCosts,
    Shutdown,
    StageAssignment,
    WorkerFailed,
    WorkerHello,
)

_POLL_MS = 200


class MeasuringWorker:
    """A worker that has greeted; `measure` may be called any number of times."""

    def __init__(self, channel: SchedulerChannel, pid: int) -> None:
        self._channel = channel
        self._process = WatchedProcess(pid)
        self._assignment: StageAssignment | None = None

    def greet(self, stages: StageArgs, num_layers: int, run_directory: str) -> None:
        """Waits for the worker, and determines its place."""
        hello = self._receive()
        assert isinstance(hello, WorkerHello)
        scheduling = SchedulingArgs(num_state_slots=stages.num_state_slots)
        args = PipelineArgs(stages=stages, scheduling=scheduling, run_directory=run_directory)
        plan = StagePlan(0, even_layer_counts(num_layers, stages.num_stages))
        self._assignment = assign([hello] * stages.num_stages, plan, args)[0]

    def measure(self, steps: Sequence[MadeUpStep]) -> PartCosts:
        """Times `steps`; if empty, only measures the memory of the model's parts.

        Raises ConfigurationError for what a flag can fix, StageFailure when the worker ends.
        """
        assert self._assignment is not None
        self._channel.send(0, MeasureCosts(self._assignment, tuple(steps)))
        answer = self._receive()
        assert isinstance(answer, MeasuredCosts)
        return answer.costs

    def _receive(self) -> FromWorker:
        while True:
            has_ended = self._process.wait(0.0)
            if self._channel.socket.poll(0 if has_ended else _POLL_MS):
                received = self._channel.receive()
                message = None if received is None else received[1]
                if isinstance(message, WorkerFailed):
                    if message.is_configuration:
                        raise ConfigurationError(message.message)
                    raise StageFailure(0, None, message.message)
                if message is not None:
                    return message
            elif has_ended:
                raise StageFailure(0, None, self._process.end())

    def close(self) -> None:
        self._channel.send(0, Shutdown())
        self._process.wait(1.0)
        self._process.close()


@contextmanager
def measuring_worker(stages: StageArgs, num_layers: int) -> Iterator[MeasuringWorker]:
    """Starts a worker, and ends it with the block."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="sgl-pipeline-measure-") as directory:
        processes = StageProcesses(directory)
        channel = SchedulerChannel(context, stage_address(directory))
        try:
            processes.start(1, stage_threads(stages.num_stages, stages.cpu_threads)[0])
            worker = MeasuringWorker(channel, processes.pids[0])
            worker.greet(stages, num_layers, directory)
            yield worker
            worker.close()
        finally:
            channel.close()
            processes.close()
            context.term()
