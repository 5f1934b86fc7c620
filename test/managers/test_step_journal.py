"""A step's record is written when all stages have reported, and a full disk ends only the trace."""

import pytest
from support.pipelines import make_request

from sgl_pipeline.managers.step_journal import StepJournal
from sgl_pipeline.messages import StageReport
from sgl_pipeline.microbatch import Chunk, Microbatch
from sgl_pipeline.throttle import PipelineLoad
from sgl_pipeline.trace import RequestRecord, StageTiming, TraceWriter, read_trace

LOAD = PipelineLoad(
    step_id=0,
    pipeline_depth=2,
    waiting_tokens=9,
    prompts=1,
    running_decodes=3,
    ready_decodes=1,
    free_pages=3,
    reserved_pages=2,
    total_pages=4,
    steps_in_flight=0,
)


def microbatch(step_id: int) -> Microbatch:
    prefill = Chunk(make_request("p", [1] * 5), 0, 5, is_decode=False, samples=True)
    decode = Chunk(make_request("d", [1]), 0, 1, is_decode=True, samples=True)
    return Microbatch(step_id, 0, (decode, prefill))


def report(stage: int, step_id: int) -> StageReport:
    return StageReport(
        stage=stage, step_id=step_id, epoch=0, input_wait_ms=stage + 0.5, compute_ms=2.0
    )


def ended_request() -> RequestRecord:
    request = make_request("d", [1, 2, 3])
    request.arrival_s, request.started_s, request.first_token_s = 7.0, 8.0, 8.5
    request.output_ids = [4, 5]
    request.cached_tokens = 1
    return RequestRecord.of(request, 10.0)


def run_step(journal: StepJournal, step_id: int) -> None:
    journal.scheduled(microbatch(step_id), LOAD, now_s=10.0, schedule_ms=0.25)
    journal.finished(step_id, (ended_request(),), now_s=11.0, result_ms=0.5)
    # The last stage's report may overtake the first one's.
    journal.reported(report(1, step_id))
    journal.reported(report(0, step_id))


def test_a_record_holds_what_the_step_carried_and_cost(tmp_path):
    journal = StepJournal(2, TraceWriter(tmp_path / "trace"))
    run_step(journal, 0)
    run_step(journal, 1)
    journal.close()
    first, second = read_trace(tmp_path / "trace")
    assert (first.step_id, second.step_id) == (0, 1)
    assert (first.prefill_tokens, first.decodes, first.waiting_tokens) == (5, 1, 9)
    assert (first.scheduled_s, first.finished_s) == (10.0, 11.0)
    assert (first.schedule_ms, first.result_ms, first.free_page_share) == (0.25, 0.5, 0.75)
    assert first.stages == (StageTiming(0.5, 2.0), StageTiming(1.5, 2.0))
    assert first.ended == (
        RequestRecord(
            request_id="d",
            prompt_tokens=3,
            cached_tokens=1,
            output_tokens=2,
            num_retractions=0,
            queue_ms=1000.0,
            first_token_ms=1500.0,
            total_ms=3000.0,
        ),
    )
    assert (journal.prefill_tokens, journal.decodes) == (10, 2)
    assert (journal.input_wait_ms, journal.compute_ms) == ([1.0, 3.0], [4.0, 4.0])
    assert journal.last_steps == {0: 1, 1: 1}


def test_without_a_trace_nothing_is_kept_but_totals():
    journal = StepJournal(2, None)
    run_step(journal, 0)
    assert journal.last_steps == {0: 0, 1: 0}
    assert journal.prefill_tokens == 5


def test_a_full_disk_ends_the_trace_and_not_the_server(tmp_path):
    class FullDisk(TraceWriter):
        def flush(self) -> None:
            raise OSError("no space left on device")

    journal = StepJournal(2, FullDisk(tmp_path / "trace"))
    run_step(journal, 0)
    run_step(journal, 1)
    assert journal.last_steps == {0: 1, 1: 1}


def test_a_step_that_was_never_scheduled_is_our_own_bug(tmp_path):
    journal = StepJournal(2, TraceWriter(tmp_path / "trace"))
    with pytest.raises(KeyError):
        journal.finished(5, (), now_s=1.0, result_ms=0.0)
