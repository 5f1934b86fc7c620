"""Hands every finished step, layer move, recovery and change of the throttle to the writers of
`--trace-path`, `--trace-steps` and profiles.

Fed by `pipeline_scheduler.py` once the steps that follow are on their way.
"""

import logging
from collections.abc import Iterable

from sgl_pipeline.records.move_record import MoveRecord
from sgl_pipeline.records.recovery_record import RecoveryRecord
from sgl_pipeline.records.throttle_change import ThrottleChange
from sgl_pipeline.records.trace import StepRecord, StepWriter

TraceEvent = StepRecord | MoveRecord | RecoveryRecord | ThrottleChange

logger = logging.getLogger(__name__)


class TraceFiles:
    """The writers of one server; those of profiles come and go."""

    def __init__(self, writers: Iterable[StepWriter] = ()) -> None:
        self._writers = list(writers)

    def add(self, writer: StepWriter) -> None:
        """`writer` gets the steps that end from now on."""
        self._writers.append(writer)

    def remove(self, writer: StepWriter) -> None:
        """Closes `writer`, unless a full disk has ended it already."""
        if writer in self._writers:
            self._writers.remove(writer)
            writer.close()

    def write(self, records: Iterable[StepRecord]) -> None:
        """Writes `records` to all. A full disk ends one trace, not the server."""
        for record in records:
            self._hand_on(record)

    def write_moves(self, records: Iterable[MoveRecord]) -> None:
        """Writes layer moves that are over to all, as `write` does with steps."""
        for record in records:
            self._hand_on(record)

    def write_changes(self, records: Iterable[ThrottleChange]) -> None:
        """Writes changes of the throttle to all, as `write` does with steps."""
        for record in records:
            self._hand_on(record)

    def write_recoveries(self, records: Iterable[RecoveryRecord]) -> None:
        """Writes recoveries that are over to all, as `write` does with steps."""
        for record in records:
            self._hand_on(record)

    def _hand_on(self, record: TraceEvent) -> None:
        for writer in tuple(self._writers):
            try:
                if isinstance(record, StepRecord):
                    writer.write(record)
                elif isinstance(record, MoveRecord):
                    writer.write_move(record)
                elif isinstance(record, RecoveryRecord):
                    writer.write_recovery(record)
                else:
                    writer.write_change(record)
                writer.flush()
            except OSError as error:
                logger.error("the trace ends with %s: %s", _name(record), error)
                self._writers.remove(writer)

    def close(self) -> None:
        for writer in tuple(self._writers):
            self.remove(writer)


def _name(record: TraceEvent) -> str:
    if isinstance(record, StepRecord):
        return f"step {record.step_id}"
    if isinstance(record, MoveRecord):
        return f"layer move {record.move}"
    if isinstance(record, RecoveryRecord):
        return f"recovery {record.incarnation}"
    return f"throttle change {record.change}"
