"""The moments from which a simulated stage and its link are free."""

from dataclasses import dataclass


@dataclass(slots=True)
class StageClock:
    """`link_free_s` is that of the link to the next stage."""

    free_s: float = 0.0
    link_free_s: float = 0.0

    def run(self, start_s: float, compute_s: float, wait_s: float) -> tuple[float, float]:
        """Runs a step that computes and waits for others' attention; returns from when on it has
        the stage for itself, and its end."""
        self.free_s = start_s + compute_s + wait_s
        return start_s, self.free_s


@dataclass(slots=True)
class SharedStageClock(StageClock):
    """The clock of a stage that holds two steps: the younger computes while the older waits.

    The older goes first; alone it computes evenly from its start to its end. `computing_until_s` is
    when all that was to be computed so far is. `free_s` is when a further step may begin: with the
    end of the older one.
    """

    last_start_s: float = 0.0
    last_end_s: float = 0.0
    last_compute_s: float = 0.0
    computing_until_s: float = 0.0

    def run(self, start_s: float, compute_s: float, wait_s: float) -> tuple[float, float]:
        """As `StageClock.run`."""
        older_end_s = self.last_end_s
        older_left_s = 0.0
        if start_s < older_end_s:
            share = (older_end_s - start_s) / (older_end_s - self.last_start_s)
            older_left_s = share * self.last_compute_s
        self.computing_until_s = compute_s + max(self.computing_until_s, start_s + older_left_s)
        end_s = max(older_end_s, start_s + compute_s + wait_s, self.computing_until_s)
        self.free_s = older_end_s
        self.last_start_s, self.last_end_s, self.last_compute_s = start_s, end_s, compute_s
        return max(start_s, older_end_s), end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """From `from_s` on a stage's steps take `factor` times as long."""

    stage: int
    from_s: float
    factor: float
    until_s: float = float("inf")

    def factor_at(self, stage: int, moment_s: float) -> float:
        """The factor by which a step that begins then is slower on that stage."""
        is_slow = stage == self.stage and self.from_s <= moment_s < self.until_s
        return self.factor if is_slow else 1.0
