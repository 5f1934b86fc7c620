"""The two lines that the log gets of each layer move, from `pipeline_scheduler.py` alone."""

import logging

from sgl_pipeline.records.move_record import MoveOutcome, MoveRecord

logger = logging.getLogger(__name__)


def log_begun(record: MoveRecord) -> None:
    """A move has begun."""
    logger.info("%s begins", _name(record))


def log_ended(record: MoveRecord) -> None:
    """A move is over."""
    assert record.ended_s is not None
    total_ms = (record.ended_s - record.began_s) * 1e3
    if record.outcome is MoveOutcome.DONE:
        logger.info(
            "%s done in %.0f ms: %.2f MiB copied, %.2f MiB patched, a step held up for at most "
            "%.1f ms",
            _name(record),
            total_ms,
            record.copied_bytes / 2**20,
            record.patched_bytes / 2**20,
            record.gap_ms,
        )
    else:
        logger.warning("%s abandoned after %.0f ms: %s", _name(record), total_ms, record.reason)


def _name(record: MoveRecord) -> str:
    before, after = (",".join(map(str, counts)) for counts in (record.before, record.after))
    return f"layer move {record.move} ({record.wanted_by}): {before} to {after}"
