"""The lines that the log gets of layer moves and of changes of the throttle.

`recovery_report.py` has those of recoveries, which name workers as well.
"""

import logging
from collections.abc import Callable
from typing import Any

from sgl_pipeline.records.event import Event
from sgl_pipeline.records.move_record import MoveOutcome, MoveRecord
from sgl_pipeline.records.throttle_change import Knob, ThrottleChange

logger = logging.getLogger(__name__)


def log_event(event: Event) -> None:
    """Logs `event`, if its kind has a line."""
    if (log := _LINES.get(type(event))) is not None:
        log(event)


def _log_move(record: MoveRecord) -> None:
    before, after = (",".join(map(str, counts)) for counts in (record.before, record.after))
    name = f"{record.label} ({record.wanted_by}): {before} to {after}"
    if record.ended_s is None:
        logger.info("%s begins", name)
        return
    total_ms = (record.ended_s - record.began_s) * 1e3
    if record.outcome is MoveOutcome.DONE:
        logger.info(
            "%s done in %.0f ms: %.2f MiB copied, %.2f MiB patched, a step held up for at most "
            "%.1f ms",
            name,
            total_ms,
            record.copied_bytes / 2**20,
            record.patched_bytes / 2**20,
            record.gap_ms,
        )
    else:
        logger.warning("%s abandoned after %.0f ms: %s", name, total_ms, record.reason)


def _log_change(change: ThrottleChange) -> None:
    logger.info(
        "%s (%s, key %s, client %s): %s, from step %d on%s",
        change.label,
        change.cause,
        change.author.key,
        change.author.client or "-",
        ", ".join(_told(name, change.before[name], value) for name, value in change.after.items()),
        change.first_step,
        "" if change.revert_after_s is None else f", for {change.revert_after_s:g} s",
    )


def _told(name: str, before: Knob, after: Knob) -> str:
    return f"{name} {before} to {after}"


_LINES: dict[type, Callable[[Any], None]] = {MoveRecord: _log_move, ThrottleChange: _log_change}
