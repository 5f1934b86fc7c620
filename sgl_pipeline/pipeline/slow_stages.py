"""Finds slow stages: for a while, their steps take a multiple of the predicted time.

Must be given the stages' speeds after every step. Pure. `stage_watch.py` finds stages that hang.
"""

from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

# Far apart, so that a stage between the two keeps its state.
SLOW_FROM = 2.0
FINE_BELOW = 1.5
# Seconds and steps for which a stage must be beyond a threshold before its state changes.
SETTLE_S = 5.0
SETTLE_STEPS = 40


class Spell(NamedTuple):
    """A stage has been beyond a threshold since `since_s`, for `steps` steps."""

    since_s: float
    steps: int


class SlowStages:
    """`slowdowns[s]` is the factor by which stage `s` is slower than predicted, relative to the
    others: if all are, the prediction or the host is the cause. `since_s` maps slow stages to the
    moment when they became slow."""

    def __init__(self, num_stages: int) -> None:
        self.slowdowns = (1.0,) * num_stages
        self.since_s: dict[int, float] = {}
        self._speeds: Sequence[float] = self.slowdowns
        self._crossings: dict[int, Spell] = {}

    def note(self, speeds: Sequence[float], now_s: float) -> None:
        """A step has ended; `speeds` come from `StepForecast`."""
        if speeds != self._speeds:
            self._speeds = speeds
            self.slowdowns = tuple(_slowdown(speeds, stage) for stage in range(len(speeds)))
        for stage, slowdown in enumerate(self.slowdowns):
            is_slow = stage in self.since_s
            if slowdown < FINE_BELOW if is_slow else slowdown >= SLOW_FROM:
                self._cross(stage, now_s)
            else:
                self._crossings.pop(stage, None)

    def interrupt(self) -> None:
        """No step runs for a while: this time does not count for any stage."""
        self._crossings.clear()

    def _cross(self, stage: int, now_s: float) -> None:
        spell = self._crossings.get(stage, Spell(now_s, 0))
        spell = self._crossings[stage] = Spell(spell.since_s, spell.steps + 1)
        if spell.steps < SETTLE_STEPS or now_s - spell.since_s < SETTLE_S:
            return
        del self._crossings[stage]
        if self.since_s.pop(stage, None) is None:
            self.since_s[stage] = spell.since_s


def _slowdown(speeds: Sequence[float], stage: int) -> float:
    others = [*speeds[:stage], *speeds[stage + 1 :]]
    return speeds[stage] / max(1.0, median_low(others) if others else 1.0)
