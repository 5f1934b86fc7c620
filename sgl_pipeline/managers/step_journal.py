"""Collects what every stage reports of every step, as `StepRecord`s, and hands them to writers.

Fed by the scheduler process; a record is complete when all stages have reported. Keeps the newest
ones for `/server_info` and the metrics, and the last step of each stage, which names the place in
the message when a stage dies. Never decides.
"""

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from sgl_pipeline.messages import StageReport
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.stage_timing import StageTiming, bubble_shares
from sgl_pipeline.trace import RequestRecord, StepRecord, StepWriter

logger = logging.getLogger(__name__)

RECENT_STEPS = 256


@dataclass(slots=True)
class _OpenStep:
    """A step that some stage has not reported yet."""

    microbatch: Microbatch
    prefill_tokens: int
    decodes: int
    scheduled_s: float
    schedule_ms: float
    finished_s: float = 0.0
    result_ms: float = 0.0
    ended: tuple[RequestRecord, ...] = ()
    timings: dict[int, StageTiming] = field(default_factory=dict)


class StepJournal:
    """One server's steps: `recent` holds the newest, oldest first, at most RECENT_STEPS.

    `input_wait_ms` and `compute_ms` hold a total for each stage.
    """

    def __init__(self, num_stages: int, writers: Iterable[StepWriter] = ()) -> None:
        self._num_stages = num_stages
        self._writers = list(writers)
        self._open: dict[int, _OpenStep] = {}
        self.recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self.last_steps: dict[int, int] = {}
        self.prefill_tokens = 0
        self.decodes = 0
        self.input_wait_ms = [0.0] * num_stages
        self.compute_ms = [0.0] * num_stages

    def scheduled(self, microbatch: Microbatch, now_s: float, schedule_ms: float) -> None:
        """A step was sent; `schedule_ms` is what deciding and encoding it cost."""
        decodes = microbatch.num_decodes
        prefill_tokens = microbatch.num_tokens - decodes
        self.prefill_tokens += prefill_tokens
        self.decodes += decodes
        self._open[microbatch.step_id] = _OpenStep(
            microbatch, prefill_tokens, decodes, now_s, schedule_ms
        )

    def finished(
        self, step_id: int, ended: tuple[RequestRecord, ...], now_s: float, result_ms: float
    ) -> None:
        """The step's result was applied, before its last stage's report is handed to `reported`.
        `ended` are the requests whose last token it brought."""
        step = self._open[step_id]
        step.ended, step.finished_s, step.result_ms = ended, now_s, result_ms

    def reported(self, report: StageReport) -> None:
        """A stage has run its part of a step."""
        self.last_steps[report.stage] = report.step_id
        self.input_wait_ms[report.stage] += report.timing.input_wait_ms
        self.compute_ms[report.stage] += report.timing.compute_ms
        step = self._open[report.step_id]
        step.timings[report.stage] = report.timing
        if len(step.timings) == self._num_stages:
            record = self._record(self._open.pop(report.step_id))
            self.recent.append(record)
            for writer in tuple(self._writers):
                self._write(writer, record)

    def describe_recent(self) -> dict[str, Any]:
        """Facts for `/server_info`: what `recent` carried, what bound the newest of them, and the
        shares of each stage's time."""
        if not self.recent:
            return {"steps": 0}
        newest = self.recent[-1]
        return {
            "steps": len(self.recent),
            "mean_prefill_tokens": fmean(step.prefill_tokens for step in self.recent),
            "mean_decodes": fmean(step.decodes for step in self.recent),
            "prefill_budget": newest.prefill_budget,
            "decode_budget": newest.decode_budget,
            "bound_by": newest.bound_by,
            "stages": [asdict(shares) for shares in bubble_shares(self.recent)],
        }

    def add_writer(self, writer: StepWriter) -> None:
        """`writer` gets the steps that end from now on."""
        self._writers.append(writer)

    def remove_writer(self, writer: StepWriter) -> None:
        """Closes `writer`, unless a full disk has ended it already."""
        if writer in self._writers:
            self._writers.remove(writer)
            writer.close()

    def close(self) -> None:
        for writer in tuple(self._writers):
            self.remove_writer(writer)

    def _write(self, writer: StepWriter, record: StepRecord) -> None:
        """A full disk ends the trace, not the server."""
        try:
            writer.write(record)
            writer.flush()
        except OSError as error:
            logger.error("the trace ends with step %d: %s", record.step_id, error)
            self._writers.remove(writer)

    def _record(self, step: _OpenStep) -> StepRecord:
        return StepRecord(
            step_id=step.microbatch.step_id,
            epoch=step.microbatch.epoch,
            prefill_tokens=step.prefill_tokens,
            decodes=step.decodes,
            samples=step.microbatch.num_samples,
            attended_tokens=step.microbatch.attended_tokens,
            waiting_tokens=step.microbatch.load.waiting_tokens,
            running_decodes=step.microbatch.load.running_decodes,
            free_page_share=step.microbatch.load.free_share,
            prefill_budget=step.microbatch.budget.prefill_tokens,
            decode_budget=step.microbatch.budget.decodes,
            bound_by=step.microbatch.budget.bound_by,
            scheduled_s=step.scheduled_s,
            finished_s=step.finished_s,
            schedule_ms=step.schedule_ms,
            result_ms=step.result_ms,
            stages=tuple(step.timings[stage] for stage in range(self._num_stages)),
            ended=step.ended,
        )
