"""The record of one recovery: which workers were lost, what it took until steps ran again."""

from typing import ClassVar

import msgspec

from sgl_pipeline.records.event import Event


class LostWorker(msgspec.Struct, frozen=True):
    """A worker that has ended or was given up. `stage` is None where it filled none: a spare.
    `has_left`: it was asked to go, and another one has taken its stage over with all pages."""

    worker: int
    stage: int | None
    reason: str
    has_left: bool = False


class RecoveryRecord(msgspec.Struct, Event, kw_only=True):
    """One recovery. Moments are seconds of the driver's clock.

    `lost` are the workers that were lost until it ended, the first of them at `began_s`.
    `survivors_s` is when the stages that are left had let go of the old stream, `stream_s` when the
    new one began, of number `incarnation`: until then no step could be decided. `ended_s` is when
    its first step had come back from all stages, or, where no step could run, when that was known.
    `num_requests` were running; of their tokens all stages must prefill `num_tokens` again, and the
    lost stages alone compute `num_replay_tokens` again. `num_stages` serve afterwards,
    `stages_before` served before: fewer serve where no worker came for a stage, more when one has
    come, in which case `lost` may be empty.
    """

    trace_key: ClassVar[str] = "recovery"

    began_s: float
    incarnation: int
    lost: tuple[LostWorker, ...] = ()
    survivors_s: float | None = None
    stream_s: float | None = None
    ended_s: float | None = None
    num_requests: int = 0
    num_tokens: int = 0
    num_replay_tokens: int = 0
    num_stages: int = 0
    stages_before: int = 0

    @property
    def label(self) -> str:
        return f"recovery {self.incarnation}"

    @property
    def has_other_stages(self) -> bool:
        """True if more or fewer stages serve than before."""
        return self.num_stages != self.stages_before

    @property
    def is_planned(self) -> bool:
        """True if workers were lost, and all of them had left."""
        return bool(self.lost) and all(one.has_left for one in self.lost)

    @property
    def is_over(self) -> bool:
        return self.ended_s is not None

    @property
    def what_happened(self) -> str:
        """Describes it in a few words."""
        stages = ", ".join(map(str, self.stages))
        verb = "handed over" if self.is_planned else "lost"
        text = f"stage {stages} {verb}" if stages else "a worker came"
        if self.has_other_stages:
            text += f", {self.num_stages} stages in place of {self.stages_before}"
        return text

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that were lost, ascending."""
        return tuple(sorted({one.stage for one in self.lost if one.stage is not None}))
