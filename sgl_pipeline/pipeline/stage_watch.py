"""Finds stages that should have reported by now: silence is measured against a stage's own steps.

To be asked a few times a second. Reads no clock and ends no stage.
"""

from collections.abc import Callable
from typing import NamedTuple

from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.pipeline.core_waits import CoreWaits, ThreadWaits, no_waits
from sgl_pipeline.pipeline.pipeline_core import PipelineCore

# A step may take this many times as long as the stage's slowest recent step. A shared host stops a
# process for a while now and then.
PATIENCE = 20.0
# Fewer steps of a stage are not enough to judge it.
FEWEST_STEPS = 16
FIRST_STEPS_S = 120.0
# Share of every stage's allowed silence after which its core waits are read.
_LOOK_SHARE = 0.1


class Silence(NamedTuple):
    """`stage` has had all inputs for the step of `microbatch` since `since_s`, `waited_s` of this
    time without a core, and should have reported it within `bound_s` besides."""

    stage: int
    microbatch: Microbatch
    since_s: float
    bound_s: float
    waited_s: float = 0.0


class StageWatch:
    """Watches the stages of `core`.

    Args:
        silence_s: seconds that every stage may be silent, even if its steps are fast.
        rehearsal_s: returns the seconds of a stage's rehearsal, when it ran everything for the
            first time.
        waits_s: returns the core waits of the threads of a stage's worker.
    """

    def __init__(
        self,
        core: PipelineCore,
        silence_s: float,
        rehearsal_s: Callable[[int], float] = lambda stage: 0.0,
        waits_s: Callable[[int], ThreadWaits] = no_waits,
    ) -> None:
        self._core = core
        self._silence_s = silence_s
        self._rehearsal_s = rehearsal_s
        self._waits = CoreWaits(waits_s)
        self._looked_at: dict[int, int] = {}  # the step that `_waits` of a stage began in

    def silent_stages(self, now_s: float) -> list[Silence]:
        """The stages that have been silent for too long. A stage that waits for another does not
        count."""
        found = []
        for stage in range(self._core.plan.num_stages):
            due = self._due_step(stage)
            if due is None or now_s - due[1] <= _LOOK_SHARE * self._silence_s:
                continue
            microbatch, since_s = due
            if self._looked_at.get(stage) != microbatch.step_id:
                self._looked_at[stage] = microbatch.step_id
                self._waits.begin(stage)
            if now_s - since_s <= self._silence_s:
                continue
            bound_s, waited_s = self.bound_s(stage, microbatch), self._waits.since_s(stage)
            if now_s - since_s - waited_s > bound_s:
                found.append(Silence(stage, microbatch, since_s, bound_s, waited_s))
        return found

    def bound_s(self, stage: int, microbatch: Microbatch | None = None) -> float:
        """Seconds for which the stage may be silent in the step of `microbatch`; None: in any step
        like the recent ones. In a worker's first step, and in the first of an epoch, the time of
        its rehearsal counts as part of a slow step."""
        recent = self._core.history.recent
        if len(recent) < FEWEST_STEPS:
            return max(self._silence_s, FIRST_STEPS_S)
        slowest_s = max(
            one.stages[stage].done_s - one.stages[stage].activations_s for one in recent
        )
        if microbatch is not None:
            most_tokens = max(one.num_tokens for one in recent)
            most_attended = max(one.attended_tokens for one in recent)
            slowest_s *= max(
                1.0,
                (microbatch.num_tokens + microbatch.num_replay_tokens) / most_tokens,
                microbatch.attended_tokens / most_attended,
            )
            if not self._core.has_run or recent[-1].epoch != microbatch.epoch:
                slowest_s += self._rehearsal_s(stage)
        return max(self._silence_s, PATIENCE * slowest_s)

    def _due_step(self, stage: int) -> tuple[Microbatch, float] | None:
        """The step that the stage should be at, and the moment since when it has had all inputs."""
        for step in self._core.open_steps:
            if stage in step.timings:
                continue
            since_s = max(step.scheduled_s, self._core.history.heard_s.get(stage, 0.0))
            if stage == 0:
                return step.microbatch, since_s
            before = step.timings.get(stage - 1)
            return None if before is None else (step.microbatch, max(since_s, before.sent_s))
        return None
