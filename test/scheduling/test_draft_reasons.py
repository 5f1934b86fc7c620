"""Each reason for no draft is told by its rule, in the order in which the scheduler looks."""

from dataclasses import replace

import pytest
from scheduling.test_drafts import decode_step, loop_request, scheduler_of
from support.microbatches import LOAD
from support.pipelines import make_request

from sgl_pipeline.requests import Lease, Request
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.scheduling.draft_reasons import DraftReason, explain_drafts, why_none
from sgl_pipeline.step_work import StepWork
from sgl_pipeline.throttle import PipelineLoad

# Of a server on which a request may have drafts.
FREE = replace(LOAD, waiting_tokens=0, running_decodes=2, decode_attended_tokens=40)


class RowTimes:
    """`StepTimes`: a step takes `base_ms`, and each row `row_ms`."""

    def __init__(self, base_ms: float, row_ms: float) -> None:
        self._base_ms, self._row_ms = base_ms, row_ms

    def step_ms(self, work: StepWork) -> float:
        return self._base_ms + self._row_ms * work.tokens


@pytest.mark.parametrize(
    ("load", "bound_by", "rule"),
    [
        (replace(FREE, running_decodes=0), "MinP", "idle"),
        (LOAD, "pause", "waiting"),
        (replace(FREE, loading_tokens=8), "pause", "loading"),
        (FREE, "pause", "pause"),
        (replace(FREE, running_decodes=8, pipeline_depth=1), "MinP", "untimed"),
        (replace(FREE, step_times=RowTimes(1.0, 5.0)), "MinP", "time"),
    ],
)
def test_what_keeps_drafts_from_all(load: PipelineLoad, bound_by: str, rule: str) -> None:
    reason = why_none(load, bound_by)  # type: ignore[arg-type]
    assert reason is not None and reason.rule == rule
    assert reason.text and not reason.text.endswith(".")


def test_a_server_whose_rows_are_cheap_has_drafts() -> None:
    assert why_none(FREE, "MinP") is None
    assert why_none(replace(FREE, step_times=RowTimes(9.0, 0.1)), "WT") is None


def reason_of(
    scheduler: StepScheduler, request: Request, load: PipelineLoad = FREE, num_spare_pages: int = 9
) -> DraftReason:
    reason = explain_drafts(request, scheduler.drafts, load, "MinP", None, num_spare_pages)
    assert reason is not None
    return reason


def test_what_keeps_drafts_from_one() -> None:
    scheduler, request = scheduler_of(), loop_request()
    assert reason_of(scheduler, request).rule == "prefill"
    microbatch = decode_step(scheduler, request)
    (chunk,) = microbatch.chunks
    told = explain_drafts(request, scheduler.drafts, LOAD, "pause", chunk, 0)
    assert told == DraftReason("drafted", "its step checks 3 draft tokens")
    scheduler.on_result(microbatch.step_id, [9, 9, 9, 9], 0.0)
    assert reason_of(scheduler, request).rule == "lookup"
    assert reason_of(scheduler, request, num_spare_pages=0).rule == "pages"
    assert reason_of(scheduler, request, LOAD).rule == "waiting"
    dear = replace(FREE, running_decodes=1, pipeline_depth=1, step_times=RowTimes(8.0, 2.0))
    assert scheduler.drafts.chance(request) == pytest.approx(1 / 3)
    told = reason_of(scheduler, request, dear)
    assert told.rule == "acceptance"
    assert told.text.startswith("33% of its draft tokens are expected to be right, 40% would be")
    request.lease = Lease("a prefill server", 1)
    assert reason_of(scheduler, request).rule == "lease"
    request.stops = replace(request.stops, max_new_tokens=3)
    request.lease = None
    assert reason_of(scheduler, request).rule == "end"


def test_a_grammar_that_forces_nothing_is_a_reason() -> None:
    request = make_request("grammar", [1, 2], 9, constrained=True)
    scheduler = scheduler_of()
    decode_step(scheduler, request)
    told = reason_of(scheduler, request)
    assert told.rule == "lookup" and "its grammar forces no text now" in told.text


def test_a_server_without_drafts_gives_no_reason() -> None:
    scheduler, request = scheduler_of(draft_tokens=0), loop_request()
    assert explain_drafts(request, scheduler.drafts, FREE, "MinP", None, 9) is None
