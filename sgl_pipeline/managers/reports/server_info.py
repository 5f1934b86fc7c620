"""The pipeline's part of `/server_info`: its start and its state, in JSON types. Upstream adds what
its front knows."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import msgspec

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.pipeline.pipeline_capacity import PipelineCapacity
from sgl_pipeline.pipeline.pipeline_state import PipelineState
from sgl_pipeline.records.recovery_record import RecoveryRecord


def describe_start(
    args: PipelineArgs, capacity: PipelineCapacity, state_bytes: Sequence[int]
) -> dict[str, Any]:
    """The pipeline as it was started; what changes with its plan is in `describe_state` as well,
    which goes before.

    Args:
        state_bytes: of a state slot in each layer, 0 in one with pages.
    """
    predicted_ms = capacity.predicted_ms
    return {
        "num_stages": capacity.plan.num_stages,
        "configured_stages": capacity.plan.num_stages,
        "layer_partition": list(capacity.plan.layer_counts),
        "predicted_step_ms_of_stages": (
            [round(stage_ms, 3) for stage_ms in predicted_ms] if predicted_ms else None
        ),
        "policy": args.throttle.policy,
        "accounting": args.scheduling.accounting,
        "page_size": args.scheduling.page_size,
        "total_pages": capacity.num_pages,
        "state_slots": capacity.num_state_slots,
        "state_bytes": sum(state_bytes),
        "state_bytes_of_layer": max(state_bytes, default=0),
        "mamba_track_interval": args.scheduling.snapshot_interval,
        "page_capacity_of_stages": [stage.num_pages for stage in capacity.stages],
        "page_bytes_of_layer": capacity.layer_page_bytes,
        "weight_bytes_of_stages": [stage.weight_bytes for stage in capacity.stages],
        "load_seconds_of_stages": [round(stage.load_seconds, 3) for stage in capacity.stages],
        "model_impl": "transformers" if args.stages.is_generic else "sglang",
        "dtype": args.stages.dtype,
        "quantization": args.stages.quantization,
        "kv_cache_dtype": args.stages.kv_cache_dtype,
        "device": args.stages.device,
        "migration": args.migration.mode,
        "stage_recovery": args.recovery.mode,
        "recovery_log_mib": args.log_mib,
        "recovery_log_pages": capacity.log_pages,
        "stage_attention_backend": capacity.attention_backend,
        "stage_kernels": capacity.layer_kernels,
    }


def summarize_start(facts: Mapping[str, Any]) -> str:
    """`describe_start` in a line for people."""
    mebibytes = ", ".join(f"{size / 2**20:.0f}" for size in facts["weight_bytes_of_stages"])
    counts = ",".join(map(str, facts["layer_partition"]))
    generic = " by transformers" if facts["model_impl"] == "transformers" else ""
    states = f"{facts['state_slots']} state slots, " if facts["state_slots"] else ""
    held = "" if facts["kv_cache_dtype"] == "auto" else f" in {facts['kv_cache_dtype']}"
    return (
        f"pipeline ready: {facts['num_stages']} stages on {facts['device']}, "
        f"layers {counts}{generic}, weights {mebibytes} MiB ({facts['dtype']}), "
        f"{facts['total_pages']} KV pages of {facts['page_size']} tokens{held}, "
        f"{states}policy {facts['policy']}, attention {facts['stage_attention_backend']}, kernels "
        f"{facts['stage_kernels']}"
    )


def describe_page(args: PipelineArgs, server_args: Any) -> dict[str, Any]:
    """The live page's facts beside `describe_start`: the model, and the bounds of a step."""
    throttle = args.throttle
    return {
        "model": server_args.served_model_name,
        "started_unix_s": round(time.time(), 3),
        "prefill_spread_steps": throttle.prefill_spread_steps,
        "max_prefill_tokens": throttle.prefill_limit,
        "min_prefill_tokens": throttle.min_prefill_tokens,
        "pause_free_share": throttle.pause_free_share,
        "target_ttft_ms": throttle.target_ttft_ms,
        "target_tpot_ms": throttle.target_tpot_ms,
        "max_running_requests": args.scheduling.most_running_requests,
    }


def describe_state(state: PipelineState) -> dict[str, Any]:
    """The pipeline as it is doing."""
    # What was predicted was predicted of the first plan.
    outdated: dict[str, Any] = {}
    if state.plan.epoch:
        outdated["predicted_step_ms_of_stages"] = None
    if state.throttle is not None:
        knobs = state.throttle.knobs
        outdated |= {"policy": knobs["policy"], "accounting": knobs["accounting"]}
    return outdated | {
        "num_stages": state.plan.num_stages,
        "total_pages": state.load.total_pages,
        "layer_partition": list(state.plan.layer_counts),
        "plan_epoch": state.plan.epoch,
        "is_paused": state.is_paused,
        "free_pages": state.load.free_pages,
        "state_slots": state.state_slots,
        "max_mamba_cache_size": state.state_slots or None,  # SGLang's name
        "free_state_slots": state.free_state_slots,
        "evictable_state_slots": state.evictable_state_slots,
        "waiting_tokens": state.load.waiting_tokens,
        "num_waiting_requests": state.waiting_requests,
        "num_running_requests": state.running_requests,
        "num_compiling_requests": state.compiling_requests,
        "num_retractions": state.num_retractions,
        "avg_spec_accept_length": state.drafts.accept_length,
        "spec_num_proposed_drafts": state.drafts.drafted_tokens,
        "spec_num_correct_drafts": state.drafts.accepted_tokens,
        "no_drafts": state.drafts.rule or None,
        "why_no_drafts": state.drafts.reason or None,
        "num_steps": state.num_steps,
        "prefill_tokens": state.prefill_tokens,
        "decodes": state.decodes,
        "recent_steps": _describe_recent(state),
        "slow_stages": [
            {
                "stage": number,
                "slowdown": round(stage.slowdown, 2),
                "for_s": round(state.now_s - (stage.slow_since_s or state.now_s), 1),
            }
            for number, stage in state.slow_stages.items()
        ],
        "is_recovering": state.current_recovery is not None,
        "recovery_log_pages": state.log_pages,
        "replayed_tokens_of_stages": list(state.replayed_tokens),
        "store": None if state.tier is None else msgspec.structs.asdict(state.tier),
        "tenants": [asdict(one) for one in state.tenants],
        "rooms": None if state.rooms is None else msgspec.structs.asdict(state.rooms),
        "recoveries": [_describe_recovery(record, state.now_s) for record in state.recoveries],
    }


def _describe_recovery(record: RecoveryRecord, now_s: float) -> dict[str, Any]:
    """One recovery; `seconds` so far, where it is under way."""
    ended_s = now_s if record.ended_s is None else record.ended_s
    return {
        "incarnation": record.incarnation,
        "stages": list(record.stages),
        "num_stages": record.num_stages,
        "stages_before": record.stages_before,
        "is_planned": record.is_planned,
        "reasons": [lost.reason for lost in record.lost],
        "is_over": record.is_over,
        "seconds": round(ended_s - record.began_s, 3),
        "ago_s": round(now_s - record.began_s, 3),
        "requests": record.num_requests,
        "tokens": record.num_tokens,
        "replay_tokens": record.num_replay_tokens,
    }


def _describe_recent(state: PipelineState) -> dict[str, Any]:
    """Tokens of the recent steps, the bound of the newest, and the shares of each stage's time."""
    steps = state.recent_steps
    if not steps:
        return {"steps": 0}
    newest = steps[-1]
    return {
        "steps": len(steps),
        "mean_prefill_tokens": fmean(step.prefill_tokens for step in steps),
        "mean_decodes": fmean(step.decodes for step in steps),
        "mean_draft_tokens": fmean(step.draft_tokens for step in steps),
        "prefill_budget": newest.prefill_budget,
        "decode_budget": newest.decode_budget,
        "bound_by": newest.bound_by,
        "budget_ms": newest.budget_ms,
        "missed_target": newest.missed_target,
        "stages": [asdict(shares) for shares in state.bubble_shares()],
    }
