"""Which stage should have reported by now: silence is measured against the stage's own steps.

Asked by `managers/stages/recovery_desk.py` a few times a second. Reads no clock and ends nothing.
"""

from typing import NamedTuple

from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.pipeline.pipeline_core import PipelineCore

# A step may take so many times as long as the stage's slowest of late did. A host that others use
# as well stops a process for a while now and then.
PATIENCE = 20.0
# Of a stage that has run fewer steps little is known: the first may compile kernels.
FEWEST_STEPS = 16
FIRST_STEPS_S = 120.0


class Silence(NamedTuple):
    """`stage` has had all it needs for the step of `microbatch` since `since_s`, and should have
    reported it within `bound_s`."""

    stage: int
    microbatch: Microbatch
    since_s: float
    bound_s: float


class StageWatch:
    """Watches the stages of `core`.

    Args:
        silence_s: seconds that every stage may be silent, however fast its steps are.
    """

    def __init__(self, core: PipelineCore, silence_s: float) -> None:
        self._core = core
        self._silence_s = silence_s

    def silent_stages(self, now_s: float) -> list[Silence]:
        """The stages that have been silent for too long. One that waits for another is not."""
        found = []
        for stage in range(self._core.plan.num_stages):
            due = self._due_step(stage)
            if due is None or now_s - due[1] <= self._silence_s:
                continue
            microbatch, since_s = due
            bound_s = self.bound_s(stage, microbatch)
            if now_s - since_s > bound_s:
                found.append(Silence(stage, microbatch, since_s, bound_s))
        return found

    def bound_s(self, stage: int, microbatch: Microbatch | None = None) -> float:
        """How long the stage may be silent in the step of `microbatch`; None: in any like those of
        late."""
        recent = self._core.history.recent
        if len(recent) < FEWEST_STEPS:
            return max(self._silence_s, FIRST_STEPS_S)
        slowest_s = max(
            one.stages[stage].done_s - one.stages[stage].activations_s for one in recent
        )
        if microbatch is not None:
            most_tokens = max(one.prefill_tokens + one.decodes for one in recent)
            most_attended = max(one.attended_tokens for one in recent)
            slowest_s *= max(
                1.0,
                (microbatch.num_tokens + microbatch.num_replay_tokens) / most_tokens,
                microbatch.attended_tokens / most_attended,
            )
        return max(self._silence_s, PATIENCE * slowest_s)

    def _due_step(self, stage: int) -> tuple[Microbatch, float] | None:
        """The step that the stage should be at, and since when it has had what it needs for it."""
        for step in self._core.open_steps:
            if stage in step.timings:
                continue
            since_s = max(step.scheduled_s, self._core.history.heard_s.get(stage, 0.0))
            if stage == 0:
                return step.microbatch, since_s
            before = step.timings.get(stage - 1)
            return None if before is None else (step.microbatch, max(since_s, before.sent_s))
        return None
