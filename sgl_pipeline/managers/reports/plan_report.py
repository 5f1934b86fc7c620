"""Describes the layer split, for `GET /pipeline/plan`, and layer moves, in JSON types."""

import time
from dataclasses import asdict
from statistics import fmean
from typing import Any

from sgl_pipeline.migration.planner_args import MoveProposal
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.pipeline.pipeline_state import PipelineState
from sgl_pipeline.records.move_record import MoveRecord
from sgl_pipeline.records.stage_timing import bubble_shares
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import layer_moves

# Taken once: a move has always begun at the same moment, whoever sets the clock.
_UNIX_OFFSET_S = time.time() - time.monotonic()


def unix_s(moment_s: float) -> float:
    """A moment of the monotonic clock, on the calendar's."""
    return round(moment_s + _UNIX_OFFSET_S, 3)


def describe_plan(state: PipelineState, migration: MigrationControl) -> dict[str, Any]:
    """The plan in use and how it is doing. Times and shares are means over the recent steps that
    ran under it; null before the first."""
    steps = state.steps_of_plan
    shares = bubble_shares(steps)
    current, proposal = state.current_move, migration.proposal
    return {
        "migration": migration.mode,
        "epoch": state.plan.epoch,
        "layer_counts": list(state.plan.layer_counts),
        "max_layer_counts": list(migration.coordinator.max_layers),
        "measured_steps": len(steps),
        "stage_ms": [
            round(fmean(step.stages[stage].compute_ms for step in steps), 3) if steps else None
            for stage in range(state.plan.num_stages)
        ],
        "stage_shares": [asdict(one) for one in shares] or None,
        "bubble_share": fmean(1.0 - one.busy for one in shares) if shares else None,
        "proposal": None if proposal is None else describe_prediction(proposal),
        "move_under_way": None if current is None else describe_move(current, state.now_s),
        "history": [describe_move(one, state.now_s) for one in state.moves if one.is_over],
    }


def describe_prediction(prediction: MoveProposal) -> dict[str, Any]:
    """The predicted effect of another split."""
    return {
        "layer_counts": list(prediction.layer_counts),
        "stage_ms_before": [round(one, 3) for one in prediction.before_ms],
        "stage_ms_after": [round(one, 3) for one in prediction.after_ms],
        "gain_share": round(prediction.gain_share, 4),
        "moved_layers": prediction.moved_layers,
        "move_cost_s": round(prediction.price_s, 3),
    }


def describe_move(record: MoveRecord, now_s: float) -> dict[str, Any]:
    """One move and what it cost, `prepare_ms` and `total_ms` so far where it is under way.

    Args:
        now_s: of the record's clock, the host's monotonic one.
    """
    end_s = now_s if record.ended_s is None else record.ended_s
    switched_s = end_s if record.switched_s is None else record.switched_s
    before, after = StagePlan(0, record.before), StagePlan(1, record.after)
    return {
        "move": record.move,
        "epoch": record.epoch,
        "wanted_by": record.wanted_by,
        "before": list(record.before),
        "after": list(record.after),
        "moved_layers": len(layer_moves(before, after)),
        "outcome": record.outcome.value,
        "reason": record.reason,
        "began_unix_s": unix_s(record.began_s),
        "prepare_ms": round((switched_s - record.began_s) * 1e3, 3),
        "total_ms": round((end_s - record.began_s) * 1e3, 3),
        "load_ms": round(record.load_ms, 3),
        "patch_ms": round(record.patch_ms, 3),
        "wait_ms": round(record.wait_ms, 3),
        "copied_bytes": record.copied_bytes,
        "patched_bytes": record.patched_bytes,
    }
