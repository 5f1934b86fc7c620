"""A step between its decision and the last stage's report of it.

A driver gets it from `PipelineCore` twice: to send its order, and when its tokens are back.
"""

from dataclasses import dataclass, field
from itertools import takewhile

from sgl_pipeline.microbatch import Chunk, Microbatch
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.records.trace import RequestRecord, StepRecord
from sgl_pipeline.requests import TokenEvent
from sgl_pipeline.wire.stage_orders import SealedOrder


@dataclass(slots=True, eq=False)
class OpenStep:
    """One step: the decision, the results, and each stage's times.

    `order` is for every stage. `events` and `finished_s` are set once the tokens are there. The
    driver adds `schedule_ms` and `result_ms`, its host's time for deciding the step and for its
    result: the core reads no clock. Moments are seconds of the driver's clock.
    """

    microbatch: Microbatch
    order: SealedOrder
    scheduled_s: float
    finished_s: float = 0.0
    schedule_ms: float = 0.0
    result_ms: float = 0.0
    events: list[TokenEvent] = field(default_factory=list)
    ended: tuple[RequestRecord, ...] = ()
    timings: dict[int, StageTiming] = field(default_factory=dict)
    is_booked: bool = False
    # Leases that a stage could not use, of the last chunks' leases; these have `leased_rows` rows.
    lost_leases: set[int] = field(default_factory=set)
    leased_rows: int = field(init=False)

    def __post_init__(self) -> None:
        leased = takewhile(_has_lease, reversed(self.microbatch.chunks))
        self.leased_rows = sum([chunk.length for chunk in leased])

    def finish(self, events: list[TokenEvent], now_s: float) -> None:
        """The tokens of the step are booked."""
        self.events, self.finished_s, self.is_booked = events, now_s, True
        self.ended = tuple(
            RequestRecord.of(event.request, now_s) for event in events if event.finish is not None
        )

    def record(self) -> StepRecord:
        """The step for traces and metrics; all stages have reported it."""
        microbatch = self.microbatch
        load, budget = microbatch.load, microbatch.budget
        work = microbatch.work
        return StepRecord(
            step_id=microbatch.step_id,
            epoch=microbatch.epoch,
            prefill_tokens=microbatch.num_prefill_tokens,
            decodes=work.decodes,
            samples=work.samples,
            attended_tokens=work.decode_attended_tokens + work.prefill_attended_tokens,
            decode_attended_tokens=work.decode_attended_tokens,
            waiting_tokens=load.waiting_tokens,
            running_decodes=load.running_decodes,
            free_page_share=load.free_share,
            prefill_budget=budget.prefill_tokens,
            decode_budget=budget.decodes,
            bound_by=budget.bound_by,
            budget_ms=budget.time.step_ms if budget.time else None,
            missed_target=budget.missed,
            scheduled_s=self.scheduled_s,
            finished_s=self.finished_s,
            schedule_ms=self.schedule_ms,
            result_ms=self.result_ms,
            stages=tuple(self.timings[stage] for stage in range(len(self.timings))),
            ended=self.ended,
            leased_rows=self.leased_rows,
            draft_tokens=microbatch.num_draft_tokens,
            # A step gives a request one token, and one for each right draft token.
            accepted_draft_tokens=sum(
                len(one.token_ids) - 1 for one in self.events if one.token_ids
            ),
        )


def _has_lease(chunk: Chunk) -> bool:
    return chunk.request.lease is not None
