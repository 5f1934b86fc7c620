"""The reply of `GET /pipeline/throttle`. JSON types only."""

from typing import Any

from sgl_pipeline.managers.reports.plan_report import unix_s
from sgl_pipeline.pipeline.throttle_control import ThrottleControl
from sgl_pipeline.records.throttle_change import ThrottleChange
from sgl_pipeline.throttle import POLICY_TABLE


def describe_throttle(control: ThrottleControl, now_s: float) -> dict[str, Any]:
    """The knobs in force, those of the start, their ranges, those that each policy reads, what goes
    back when, and the past.

    Args:
        now_s: of the control's clock.
    """
    state = control.state()
    revert = None
    if state.reverts_at_s is not None:
        revert = {"in_s": round(state.reverts_at_s - now_s, 3), "to": state.reverts_to}
    return {
        **state.knobs,
        "prefill_limit": state.prefill_limit,
        "at_start": control.at_start,
        "ranges": control.ranges,
        "policy_knobs": {name: entry.knobs for name, entry in POLICY_TABLE.items()},
        "revert": revert,
        "history": [describe_change(change) for change in state.history],
    }


def describe_change(change: ThrottleChange) -> dict[str, Any]:
    """One change: what, by whom, when."""
    return {
        "change": change.change,
        "cause": change.cause,
        "by": {"key": change.author.key, "client": change.author.client},
        "at_unix_s": unix_s(change.changed_s),
        "first_step": change.first_step,
        "before": change.before,
        "after": change.after,
        "revert_after_s": change.revert_after_s,
    }
