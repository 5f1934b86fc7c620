"""Collects what every stage reports of every step, and writes it down as `StepRecord`s.

Fed by the scheduler process; a record is complete when all stages have reported. Also keeps the
last step of each stage, which names the place in the message when a stage dies. Never decides.
"""

import logging
from dataclasses import dataclass, field

from sgl_pipeline.messages import StageReport
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.throttle.load import PipelineLoad
from sgl_pipeline.trace import RequestRecord, StageTiming, StepRecord, TraceWriter

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _OpenStep:
    """A step that some stage has not reported yet."""

    microbatch: Microbatch
    load: PipelineLoad
    scheduled_s: float
    schedule_ms: float
    finished_s: float = 0.0
    result_ms: float = 0.0
    ended: tuple[RequestRecord, ...] = ()
    timings: dict[int, StageTiming] = field(default_factory=dict)


class StepJournal:
    """One server's steps. Without a writer only the totals and `last_steps` are kept.

    `input_wait_ms` and `compute_ms` hold a total for each stage.
    """

    def __init__(self, num_stages: int, writer: TraceWriter | None) -> None:
        self._num_stages = num_stages
        self._writer = writer
        self._open: dict[int, _OpenStep] = {}
        self.last_steps: dict[int, int] = {}
        self.prefill_tokens = 0
        self.decodes = 0
        self.input_wait_ms = [0.0] * num_stages
        self.compute_ms = [0.0] * num_stages

    def scheduled(
        self, microbatch: Microbatch, load: PipelineLoad, now_s: float, schedule_ms: float
    ) -> None:
        """A step was sent; `schedule_ms` is what deciding and encoding it cost."""
        self.prefill_tokens += microbatch.num_prefill_tokens
        self.decodes += microbatch.num_decodes
        if self._writer is not None:
            self._open[microbatch.step_id] = _OpenStep(microbatch, load, now_s, schedule_ms)

    def finished(
        self, step_id: int, ended: tuple[RequestRecord, ...], now_s: float, result_ms: float
    ) -> None:
        """The step's result was applied, before its last stage's report is handed to `reported`.
        `ended` are the requests whose last token it brought."""
        if self._writer is not None:
            step = self._open[step_id]
            step.ended, step.finished_s, step.result_ms = ended, now_s, result_ms

    def reported(self, report: StageReport) -> None:
        """A stage has run its part of a step."""
        self.last_steps[report.stage] = report.step_id
        self.input_wait_ms[report.stage] += report.input_wait_ms
        self.compute_ms[report.stage] += report.compute_ms
        if self._writer is None:
            return
        step = self._open[report.step_id]
        step.timings[report.stage] = StageTiming(report.input_wait_ms, report.compute_ms)
        if len(step.timings) == self._num_stages:
            self._write(self._record(self._open.pop(report.step_id)))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, record: StepRecord) -> None:
        """A full disk ends the trace, not the server."""
        assert self._writer is not None
        try:
            self._writer.write(record)
            self._writer.flush()
        except OSError as error:
            logger.error("the trace ends with step %d: %s", record.step_id, error)
            self._writer = None
            self._open.clear()

    def _record(self, step: _OpenStep) -> StepRecord:
        return StepRecord(
            step_id=step.microbatch.step_id,
            epoch=step.microbatch.epoch,
            prefill_tokens=step.microbatch.num_prefill_tokens,
            decodes=step.microbatch.num_decodes,
            samples=step.microbatch.num_samples,
            attended_tokens=step.microbatch.attended_tokens,
            waiting_tokens=step.load.waiting_tokens,
            running_decodes=step.load.running_decodes,
            free_page_share=step.load.free_share,
            scheduled_s=step.scheduled_s,
            finished_s=step.finished_s,
            schedule_ms=step.schedule_ms,
            result_ms=step.result_ms,
            stages=tuple(step.timings[stage] for stage in range(self._num_stages)),
            ended=step.ended,
        )
