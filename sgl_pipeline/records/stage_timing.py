"""The moments of a stage in a step, and the causes of its idle time.

Stages stamp their steps (`pp_runner/stage_runner.py`, `simulator/virtual_pipeline.py`) and send the
stamps with their reports; `trace.StepRecord` keeps them. `bubble_shares` is what `/server_info`,
the metrics and the benchmarks show. Moments are seconds of the host's monotonic clock, which all
processes share, or of the simulator's.
"""

import operator
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

# Fields of BubbleShares.
BUBBLE_CAUSES = ("activations", "metadata", "slot")


class StageTiming(msgspec.Struct, frozen=True):
    """The moments of one step on one stage, in this order.

    On a GPU they are the host's: only the last stage looks when its kernels are done. It launches
    the next step before that; what was done for that step until then took no time in which it could
    have run, so no moment of a step is before its `free_s`. The simulator does not separate
    `layers_s` from `done_s`.
    """

    free_s: float  # what it did before was sent on; for the first step, it was ready
    plan_s: float  # it took the plan
    inputs_s: float  # the step's inputs were built from it
    activations_s: float  # the rows from upstream were there: it began to compute
    layers_s: float  # its layers were done
    done_s: float  # the tokens were on the host; on all but the last stage the same
    sent_s: float  # the link had taken its rows

    def shifted(self, offset_s: float) -> "StageTiming":
        """The same moments by a clock that is `offset_s` ahead."""
        if offset_s == 0.0:
            return self
        return StageTiming(*(moment_s + offset_s for moment_s in msgspec.structs.astuple(self)))

    @property
    def is_in_order(self) -> bool:
        """True if these can be moments of one step: each is a number, and none before another."""
        moments = (0.0, *msgspec.structs.astuple(self), sys.float_info.max)
        return all(map(operator.le, moments, moments[1:]))

    @property
    def input_wait_ms(self) -> float:
        """Milliseconds from being free to having its input."""
        return (self.activations_s - self.free_s) * 1e3

    @property
    def compute_ms(self) -> float:
        return (self.done_s - self.activations_s) * 1e3


class TimedStep(Protocol):
    """The part of a `trace.StepRecord` that these functions need."""

    @property
    def scheduled_s(self) -> float: ...
    @property
    def finished_s(self) -> float: ...
    @property
    def result_ms(self) -> float: ...
    @property
    def stages(self) -> tuple[StageTiming, ...]: ...


@dataclass(frozen=True, slots=True)
class BubbleShares:
    """Shares of one stage's time, without the time in which there was nothing to do.

    `activations`: it waited for upstream's rows. `metadata`: the step was decided, but its plan was
    on the way or being turned into inputs. `slot`: it waited for room, in the link behind it or in
    the pipeline: steps were in flight, and none could be added before one of them came back.
    `busy` is the rest; the four add up to 1.
    """

    busy: float
    activations: float
    metadata: float
    slot: float


def bubble_shares(steps: Iterable[TimedStep]) -> tuple[BubbleShares, ...]:
    """The shares of each stage over consecutive steps; none without a step.

    A stage had nothing to do from when the last step in flight was booked until the next was
    decided. The time before the first of `steps` is left out, for it is unknown what was in flight.
    """
    totals: list[_Seconds] = []
    booked_s = None
    for step in steps:
        totals = totals or [_Seconds() for _ in step.stages]
        for total, timing in zip(totals, step.stages, strict=True):
            total.add(timing, step.scheduled_s, booked_s)
        booked_s = step.finished_s + step.result_ms * 1e-3
    return tuple(total.shares() for total in totals)


@dataclass(slots=True)
class _Seconds:
    """The time of one stage, by what it was spent on."""

    busy: float = 0.0
    activations: float = 0.0
    metadata: float = 0.0
    slot: float = 0.0

    def add(self, timing: StageTiming, scheduled_s: float, booked_s: float | None) -> None:
        """`booked_s`: when the step before was booked; None for the first."""
        decided_s = max(timing.free_s, scheduled_s)
        if booked_s is not None:
            self.slot += max(0.0, min(decided_s, booked_s) - timing.free_s)
        self.metadata += timing.inputs_s - decided_s
        self.activations += timing.activations_s - timing.inputs_s
        self.busy += timing.done_s - timing.activations_s
        self.slot += timing.sent_s - timing.done_s

    def shares(self) -> BubbleShares:
        whole = self.busy + self.activations + self.metadata + self.slot or 1.0
        return BubbleShares(
            self.busy / whole, self.activations / whole, self.metadata / whole, self.slot / whole
        )
