"""Steps of two stages as a `StepJournal` sees them, with numbers to check against."""

from support.microbatches import microbatch_of
from support.pipelines import make_request

from sgl_pipeline.managers.step_journal import StepJournal
from sgl_pipeline.messages import StageReport
from sgl_pipeline.microbatch import Chunk, Microbatch
from sgl_pipeline.stage_timing import StageTiming
from sgl_pipeline.trace import RequestRecord


def microbatch(step_id: int) -> Microbatch:
    prefill = Chunk(make_request("p", [1] * 5), 0, 5, is_decode=False, samples=True)
    decode = Chunk(make_request("d", [1]), 0, 1, is_decode=True, samples=True)
    return microbatch_of(step_id, (decode, prefill))


def report(stage: int, step_id: int) -> StageReport:
    return StageReport(stage=stage, step_id=step_id, epoch=0, timing=timing(stage))


def timing(stage: int) -> StageTiming:
    """Computes for two milliseconds after a wait of one half, or one and a half."""
    start = 10.0005 + stage * 1e-3
    return StageTiming(10.0, 10.0, 10.0, start, *[start + 2e-3] * 3)


def ended_request() -> RequestRecord:
    request = make_request("d", [1, 2, 3])
    request.arrival_s, request.started_s, request.first_token_s = 7.0, 8.0, 8.5
    request.output_ids = [4, 5]
    request.cached_tokens = 1
    return RequestRecord.of(request, 10.0)


def run_step(journal: StepJournal, step_id: int) -> None:
    """A step from its schedule to the last report, always at the same times."""
    journal.scheduled(microbatch(step_id), now_s=10.0, schedule_ms=0.25)
    journal.finished(step_id, (ended_request(),), now_s=11.0, result_ms=0.5)
    # The last stage's report may overtake the first one's.
    journal.reported(report(1, step_id))
    journal.reported(report(0, step_id))
