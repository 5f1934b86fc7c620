"""Puts what the scheduler process sends to the live page into JSON, as short as a page needs it.

Once for all viewers. `page/model.js` reads it: whoever changes
one changes the other. Moments are microseconds of the host's monotonic clock.
"""

from typing import Any

import msgspec

from sgl_pipeline.managers.channels.live_channel import LiveTick
from sgl_pipeline.managers.reports.plan_report import describe_move
from sgl_pipeline.pipeline.draft_state import DraftState
from sgl_pipeline.pipeline.pipeline_state import (
    OffloadState,
    PipelineState,
    RoomsState,
    TierState,
)
from sgl_pipeline.records.move_record import MoveRecord
from sgl_pipeline.records.recovery_record import RecoveryRecord
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.records.trace import RequestRecord, StepRecord
from sgl_pipeline.scheduling.tenant_state import TenantState
from sgl_pipeline.throttle.step_curve import CURVE_DECODES

_encoder = msgspec.json.Encoder()


def server_sent_event(name: str, data: Any) -> bytes:
    """One event of the stream; `data` is encoded as JSON, which holds no line break."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _encoder.encode(data))


def describe_tick(tick: LiveTick, num_viewers: int) -> dict[str, Any]:
    """One tick; `moves`, `queue` and `curve` only where they were sent."""
    state = tick.state
    optional: dict[str, Any] = {}
    if tick.queue is not None:
        optional["queue"] = tick.queue
    if tick.curve:
        optional["curve"] = [CURVE_DECODES, [round(one, 3) for one in tick.curve]]
    if state.moves:
        optional["moves"] = [_move(record, state.now_s) for record in state.moves]
    if state.recoveries:
        optional["recoveries"] = [_recovery(record) for record in state.recoveries]
    if state.tier is not None and state.tier.backend is not None:
        optional["store"] = _store(state.tier)
    if state.drafts.most_each:
        optional["drafts"] = _drafts(state.drafts)
    if state.state_slots:
        cached = state.evictable_state_slots
        optional["state_slots"] = [state.used_state_slots, cached, state.state_slots]
    if state.rooms is not None:
        optional["rooms"] = _rooms(state.rooms)
    if state.tenants:
        optional["tenants"] = [_tenant(one) for one in state.tenants]
    ended = [_ended(request, step) for step in state.recent_steps for request in step.ended]
    return (
        _counts(state)
        | {
            "viewers": num_viewers,
            "missed": tick.missed_ticks,
            "steps": [_step(step) for step in state.recent_steps],
            "ended": ended,
            "followed": tick.followed,
            "carried": tick.carried,
        }
        | optional
    )


def _counts(state: PipelineState) -> dict[str, Any]:
    load, naive = state.load, state.naive_load
    return {
        "now": _us(state.now_s),
        "epoch": state.plan.epoch,
        "layers": state.plan.layer_counts,
        "paused": state.is_paused,
        "waiting": state.waiting_requests,
        "compiling": state.compiling_requests,
        "running": state.running_requests,
        "decoding": load.running_decodes,
        "in_flight": load.steps_in_flight,
        "waiting_tokens": load.waiting_tokens,
        "naive_waiting_tokens": naive.waiting_tokens,
        "free_pages": load.free_pages,
        "unused_pages": state.unused_pages,
        "reserved_pages": load.reserved_pages,
        "total_pages": load.total_pages,
        "num_steps": state.num_steps,
        "prefill_tokens": state.prefill_tokens,
        "decoded": state.decoded_tokens,
        "cached_tokens": state.cached_tokens,
        "prompt_tokens": state.prompt_tokens,
        "retractions": state.num_retractions,
    }


def _step(step: StepRecord) -> list[Any]:
    """A step and its stages; a stage's moments count from when the step was scheduled."""
    return [
        step.step_id,
        step.epoch,
        step.prefill_tokens,
        step.decodes,
        step.draft_tokens,
        step.waiting_tokens,
        step.running_decodes,
        round(step.free_page_share, 4),
        step.prefill_budget,
        step.decode_budget,
        None if step.budget_ms is None else round(step.budget_ms, 2),
        step.bound_by,
        _us(step.scheduled_s),
        _us(step.finished_s + step.result_ms * 1e-3),
        [_stage(timing, step.scheduled_s) for timing in step.stages],
    ]


def _drafts(drafts: DraftState) -> dict[str, Any]:
    """Counts since the start; `rule` and `why`, where there are none now."""
    return {
        "most_each": drafts.most_each,
        "steps": drafts.steps,
        "drafted": drafts.drafted_tokens,
        "accepted": drafts.accepted_tokens,
        "rule": drafts.rule,
        "why": drafts.reason,
    }


def _stage(timing: StageTiming, scheduled_s: float) -> list[int]:
    return [
        round((moment - scheduled_s) * 1e6)
        for moment in (
            timing.free_s,
            timing.inputs_s,
            timing.activations_s,
            timing.done_s,
            timing.sent_s,
        )
    ]


def _ended(request: RequestRecord, step: StepRecord) -> list[Any]:
    return [
        request.request_id,
        _us(step.finished_s),
        request.prompt_tokens,
        request.cached_tokens,
        request.output_tokens,
        request.num_retractions,
        round(request.queue_ms, 2),
        round(request.first_token_ms, 2),
        round(request.total_ms, 2),
    ]


def _move(record: MoveRecord, now_s: float) -> dict[str, Any]:
    return describe_move(record, now_s) | {
        "began": _us(record.began_s),
        "switched": None if record.switched_s is None else _us(record.switched_s),
        "over": None if record.ended_s is None else _us(record.ended_s),
    }


def _recovery(record: RecoveryRecord) -> dict[str, Any]:
    """A recovery as a mark: without steps from `began` to `over`."""
    alone = f", {record.num_replay_tokens} on it alone" if record.num_replay_tokens else ""
    return {
        "began": _us(record.began_s),
        "over": None if record.ended_s is None else _us(record.ended_s),
        "text": f"{record.what_happened}, {record.num_tokens} tokens again{alone}",
    }


def _store(tier: TierState) -> dict[str, Any]:
    """The store that is attached; tokens of waiting requests, pages under way, and totals."""
    return {
        "backend": tier.backend,
        "waiting": [tier.cached_tokens, tier.loading_tokens, tier.compute_tokens],
        "loading_ms": round(1e3 * tier.loading_s, 1),
        "under_way": [tier.loading_pages, tier.saving_pages],
        "lookups": tier.lookups,
        "hits": tier.hits,
        "tokens": [tier.loaded_tokens, tier.saved_tokens],
        "bytes": [tier.loaded_bytes, tier.saved_bytes],
        "seconds": [round(tier.load_s, 3), round(tier.save_s, 3)],
        "missed": tier.missed_tokens,
        "dropped": tier.dropped_tokens,
        "broken_pages": tier.broken_pages,
    }


def _rooms(rooms: RoomsState) -> dict[str, Any]:
    """The rooms of a server with a role: those under way, their pages, and totals."""
    return {
        "mode": rooms.mode,
        "peers": rooms.num_peers,
        "waiting": rooms.bootstrap_requests,
        "moving": rooms.transfer_requests,
        "held_pages": rooms.held_pages,
        "promised_pages": rooms.promised_pages,
        "pending_pages": rooms.pending_pages,
        "done": rooms.transferred,
        "done_ms": round(rooms.mean_transfer_ms, 1),
        "loaded_pages": rooms.loaded_pages,
        "failed": [rooms.bootstrap_failed, rooms.transfer_failed],
        "computed_here": rooms.computed_here,
        "offload": None if rooms.offload is None else _offload(rooms.offload),
    }


def _tenant(tenant: TenantState) -> list[Any]:
    """One tenant, or "other"."""
    return [
        tenant.name,
        tenant.weight,
        tenant.unit,
        round(tenant.service, 1),
        None if tenant.lead is None else round(tenant.lead, 1),
        tenant.waiting,
        tenant.running,
        tenant.pages,
    ]


def _offload(offload: OffloadState) -> dict[str, Any]:
    """Attention that is lent, or computed elsewhere."""
    return {
        "rooms": offload.lent_rooms,
        "pages": offload.lent_pages,
        "requests": offload.requests,
        "tokens": offload.tokens,
        "offloaded": offload.offloaded,
        "ended_early": offload.ended_early,
    }


def _us(moment_s: float) -> int:
    return round(moment_s * 1e6)
