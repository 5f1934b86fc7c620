"""Steps of two stages as they end, with numbers to check against."""

from typing import Any

import msgspec
from support.microbatches import microbatch_of
from support.pipelines import make_request

from sgl_pipeline.microbatch import Chunk, Microbatch
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.pipeline_state import RoomsState, TierState
from sgl_pipeline.records.recovery_record import LostWorker, RecoveryRecord
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.records.throttle_change import Author, ThrottleChange
from sgl_pipeline.records.trace import RequestRecord, StepRecord
from sgl_pipeline.wire.stage_orders import SealedOrder


def microbatch(step_id: int) -> Microbatch:
    prefill = Chunk(make_request("p", [1] * 5), 0, 5, is_decode=False, samples=True)
    decode = Chunk(make_request("d", [1]), 0, 1, is_decode=True, samples=True)
    return microbatch_of(step_id, (decode, prefill))


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


def step_record(step_id: int) -> StepRecord:
    """A step that both stages have reported, always with the same times."""
    step = OpenStep(microbatch(step_id), SealedOrder(0, step_id, 0, b""), scheduled_s=10.0)
    step.schedule_ms, step.result_ms, step.finished_s = 0.25, 0.5, 11.0
    step.ended = (ended_request(),)
    # The last stage's report may overtake the first one's.
    step.timings = {1: timing(1), 0: timing(0)}
    return step.record()


def recovery_record() -> RecoveryRecord:
    """Stage 1 was lost at 10 s and ran again at 12.5 s."""
    return RecoveryRecord(
        began_s=10.0,
        incarnation=3,
        lost=(LostWorker(4, 1, "killed"),),
        survivors_s=10.25,
        ended_s=12.5,
        num_requests=2,
        num_tokens=70,
    )


def throttle_change() -> ThrottleChange:
    """Two knobs, for a minute."""
    return ThrottleChange(
        change=3,
        cause="operator",
        author=Author("admin", "10.0.0.1"),
        changed_s=10.5,
        first_step=7,
        before={"prefill_spread_steps": 8, "max_prefill_tokens": None},
        after={"prefill_spread_steps": 4, "max_prefill_tokens": 512},
        revert_after_s=60.0,
    )


def rooms_state(**changed: Any) -> RoomsState:
    """A decode server that has loaded prompts, and of which some have failed."""
    state = RoomsState(
        mode="decode",
        num_peers=2,
        bootstrap_requests=3,
        transfer_requests=4,
        promised_pages=25,
        pending_pages=10,
        transferred=8,
        transfer_s=2.0,
        bootstrap_s=6.0,
        alloc_s=1.0,
        bootstrap_failed=2,
        transfer_failed=1,
        computed_here=1,
        loaded_pages=160,
    )
    return msgspec.structs.replace(state, **changed)


def tier_state(**changed: Any) -> TierState:
    """A store that has been read and written."""
    state = TierState(
        backend="file",
        cached_tokens=10,
        loading_tokens=20,
        compute_tokens=30,
        loading_s=0.25,
        loading_pages=4,
        saving_pages=5,
        lookups=8,
        hits=6,
        found_tokens=900,
        loaded_tokens=800,
        missed_tokens={"deadline": 60, "slower_than_compute": 40},
        saved_tokens=700,
        dropped_tokens={"pressure": 50, "failed": 6},
        broken_pages=2,
        loaded_bytes=3_000_000_000,
        saved_bytes=1_000_000_000,
        load_s=1.5,
        save_s=4.0,
    )
    return msgspec.structs.replace(state, **changed)
