"""The moments from which a simulated stage and its link are free."""

from dataclasses import dataclass


@dataclass(slots=True)
class StageClock:
    """`link_free_s` is that of the link to the next stage."""

    free_s: float = 0.0
    link_free_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """From `from_s` on a stage's steps take `factor` times as long."""

    stage: int
    from_s: float
    factor: float
    until_s: float = float("inf")

    def factor_at(self, stage: int, moment_s: float) -> float:
        """By what a step that begins then is slowed on that stage."""
        is_slow = stage == self.stage and self.from_s <= moment_s < self.until_s
        return self.factor if is_slow else 1.0
