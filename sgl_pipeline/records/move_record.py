"""The record of one layer move: who wanted it, how far it got, what it cost."""

from enum import StrEnum
from typing import ClassVar

import msgspec

from sgl_pipeline.records.event import Event


class MoveOutcome(StrEnum):
    """The progress of a move; the last two are ends."""

    PREPARING = "preparing"
    SWITCHING = "switching"
    DONE = "done"
    ABANDONED = "abandoned"


class MoveRecord(msgspec.Struct, Event, kw_only=True):
    """One move and what it cost. Moments are seconds of the driver's clock.

    `wanted_by` is `operator`, `undo` or `auto`. `epoch` is that of the new plan. `reason` is why a
    move was abandoned, or what cut short the end of one that is done. Bytes are the keys and values
    of all stages together: `copied_bytes` while the old plan ran, `patched_bytes` after the switch.
    `load_ms` is the longest time that a stage took for its weights, `patch_ms` for its patches,
    `wait_ms` the longest time that a step waited for them.
    """

    trace_key: ClassVar[str] = "layer_move"

    move: int
    epoch: int
    wanted_by: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    outcome: MoveOutcome = MoveOutcome.PREPARING
    reason: str = ""
    began_s: float
    switched_s: float | None = None
    ended_s: float | None = None
    copied_bytes: int = 0
    patched_bytes: int = 0
    load_ms: float = 0.0
    patch_ms: float = 0.0
    wait_ms: float = 0.0

    @property
    def label(self) -> str:
        return f"layer move {self.move}"

    @property
    def is_over(self) -> bool:
        return self.outcome in (MoveOutcome.DONE, MoveOutcome.ABANDONED)

    @property
    def gap_ms(self) -> float:
        """At most how long the move held up a step: one stage's patches and another's wait for
        them may overlap."""
        return self.patch_ms + self.wait_ms
