"""Steps that were launched and not yet reported.

They are reported in the order of the steps. Only the last stage on a GPU has reports that are not
ready: the next step is launched while their token ids are on the way to the host. Never starts
anything.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.output.output_tail import PendingOutputs
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.requests import LogprobRows
from sgl_pipeline.wire.lease_orders import OffloadedWork
from sgl_pipeline.wire.stage_messages import StageReport
from sgl_pipeline.wire.step_order import MirroredChunk


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    """A step of `chunks` that has all that its `layers` need except its activations. Before it the
    stage has computed `replayed` again. The moments are defined by `StageTiming`."""

    step_id: int
    epoch: int
    layers: range
    chunks: Sequence[MirroredChunk]
    inputs: StepInputs
    plan_s: float
    inputs_s: float
    replayed: Sequence[MirroredChunk] = ()


@dataclass(slots=True)
class StepClock:
    """The moment at which a stage finished the last step that it reported: `StageTiming.free_s`."""

    free_s: float

    def timing(self, *moments: float) -> StageTiming:
        """The timing of the next step; see `StageTiming` for a step that was launched before
        that."""
        timing = StageTiming(self.free_s, *[max(self.free_s, moment) for moment in moments])
        self.free_s = timing.sent_s
        return timing


@dataclass(frozen=True, slots=True, eq=False)
class PendingReport:
    """The report of a launched step.

    `moments` end with `layers_s`; `sent_s` is when the step was launched, on all but the last stage
    with its rows in the link. `outputs` are the last stage's. `offloaded` is the work of a step
    that had rows of leases, and the leases that it has lost.
    """

    clock: StepClock
    stage: int
    step: PreparedStep
    moments: tuple[float, float, float, float]
    sent_s: float
    outputs: PendingOutputs | None
    offloaded: tuple[OffloadedWork, tuple[int, ...]] | None = None

    def is_ready(self) -> bool:
        """True if `report` need not wait for the device."""
        return self.outputs is None or self.outputs.is_ready()

    def report(self) -> StageReport:
        """To be called once, after the reports of earlier steps; waits for the device."""
        token_ids: tuple[int, ...] | None = None
        logprobs: tuple[LogprobRows, ...] = ()
        done_s, sent_s = self.moments[-1], self.sent_s
        if self.outputs is not None:
            token_ids, logprobs = self.outputs.result()
            done_s = sent_s = time.monotonic()
        work, lost_leases = self.offloaded or (None, ())
        return StageReport(
            stage=self.stage,
            step_id=self.step.step_id,
            epoch=self.step.epoch,
            timing=self.clock.timing(*self.moments, done_s, sent_s),
            token_ids=token_ids,
            logprobs=logprobs,
            offloaded=work,
            lost_leases=lost_leases,
        )


class PendingReports:
    """The reports of a stage, oldest first; `send` takes each when it is ready, in order."""

    def __init__(self, send: Callable[[StageReport], None]) -> None:
        self._send = send
        self._pending: deque[PendingReport] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, pending: PendingReport) -> None:
        """Takes the next step's report, and sends it at once if it and all before it are ready."""
        self._pending.append(pending)
        self.send_ready()

    def send_ready(self) -> None:
        """Sends the ready reports; never waits."""
        while self._pending and self._pending[0].is_ready():
            self._send_oldest()

    def send_all_but(self, count: int) -> None:
        """Sends the oldest until `count` are left; waits for the device."""
        while len(self._pending) > count:
            self._send_oldest()

    def _send_oldest(self) -> None:
        self._send(self._pending.popleft().report())
