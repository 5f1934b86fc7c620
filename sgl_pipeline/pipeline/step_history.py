"""The contents of one server's steps, and the time that its stages spent on them."""

from collections import deque
from collections.abc import Iterator

from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.pipeline_load import Bound
from sgl_pipeline.records.trace import StepRecord

RECENT_STEPS = 256


class StepHistory:
    """`recent` holds the newest records of the stages that run now, oldest first, at most
    RECENT_STEPS.

    `prefill_tokens` and `decodes` count what was scheduled since the start, `input_wait_ms` and
    `compute_ms` are totals for each position in the pipeline, also for positions that no longer
    exist. `last_steps` maps a stage to the last step that it reported, `heard_s` to the time of
    that report on the driver's clock. `newest_bound` is what bound the newest decided step.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        self.last_steps: dict[int, int] = {}
        self.heard_s: dict[int, float] = {}
        self.newest_bound: Bound = "MaxP"
        self.prefill_tokens = 0
        self.decodes = 0
        self.input_wait_ms = [0.0] * num_stages
        self.compute_ms = [0.0] * num_stages

    def start_over(self, num_stages: int) -> None:
        """`num_stages` stages run the next steps; earlier steps are not comparable."""
        self._num_stages = num_stages
        self.recent.clear()
        self.last_steps.clear()
        self.heard_s.clear()
        missing = [0.0] * max(0, num_stages - len(self.compute_ms))
        self.input_wait_ms += missing
        self.compute_ms += missing

    def scheduled(self, microbatch: Microbatch) -> None:
        """Counts a step that was decided."""
        self.newest_bound = microbatch.budget.bound_by
        self.decodes += microbatch.num_decodes
        self.prefill_tokens += microbatch.num_prefill_tokens

    def add(self, record: StepRecord) -> None:
        """Keeps a step that all stages have reported."""
        if len(record.stages) == self._num_stages:
            self.recent.append(record)
        for stage, timing in enumerate(record.stages):
            self.input_wait_ms[stage] += timing.input_wait_ms
            self.compute_ms[stage] += timing.compute_ms

    def stage_totals(self) -> Iterator[tuple[float, float, int | None]]:
        """For each stage the totals of waiting and of computing, and its last step."""
        for stage, wait_ms in enumerate(self.input_wait_ms):
            yield wait_ms, self.compute_ms[stage], self.last_steps.get(stage)
