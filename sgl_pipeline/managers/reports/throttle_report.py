"""What `GET /pipeline/throttle` says of the knobs, and the line that the log gets of a change.

Called by `front/operator_replies.py` and `pipeline_scheduler.py`. JSON types only.
"""

import logging
from typing import Any

from sgl_pipeline.managers.reports.plan_report import unix_s
from sgl_pipeline.pipeline.throttle_control import ThrottleControl
from sgl_pipeline.records.throttle_change import Knob, ThrottleChange
from sgl_pipeline.throttle import POLICY_TABLE

logger = logging.getLogger(__name__)


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


def log_change(change: ThrottleChange) -> None:
    """A change is in force."""
    logger.info(
        "throttle change %d (%s, key %s, client %s): %s, from step %d on%s",
        change.change,
        change.cause,
        change.author.key,
        change.author.client or "-",
        ", ".join(_told(name, change.before[name], value) for name, value in change.after.items()),
        change.first_step,
        "" if change.revert_after_s is None else f", for {change.revert_after_s:g} s",
    )


def _told(name: str, before: Knob, after: Knob) -> str:
    return f"{name} {before} to {after}"
