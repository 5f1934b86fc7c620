"""Who may move layers, and when: the operator by hand, or the planner by what steps cost.

Owned by `PipelineCore`. The move itself is `migration/coordinator.py`'s.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from sgl_pipeline.args import MigrationArgs
from sgl_pipeline.errors import MoveRefused
from sgl_pipeline.layer_moves import MoveOrder, MoveReport
from sgl_pipeline.migration.coordinator import MoveCoordinator
from sgl_pipeline.move_record import MoveOutcome, MoveRecord
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.trace import StepRecord


class Prediction(Protocol):
    """What another layer split would bring. Times are predicted milliseconds of a recent step on
    each stage, before and after; `gain_share` is by how much of its time the slowest stage gets
    faster, `price_s` the seconds of the pipeline's time that the move is taken to cost."""

    @property
    def layer_counts(self) -> tuple[int, ...]: ...
    @property
    def before_ms(self) -> tuple[float, ...]: ...
    @property
    def after_ms(self) -> tuple[float, ...]: ...
    @property
    def gain_share(self) -> float: ...
    @property
    def moved_layers(self) -> int: ...
    @property
    def price_s(self) -> float: ...


class SplitPredictor(Protocol):
    """What has learnt from steps what a split costs (`migration/planner.py`)."""

    def preview(self, current: Sequence[int], layer_counts: Sequence[int]) -> Prediction | None:
        """What moving from one split to another would bring; None before enough is known."""


class MigrationControl:
    """The moves of one pipeline. `proposal` is the newest that the planner made and that is still
    worth it, None where there is none.

    Args:
        mode: `off`, `manual` or `auto` (`args.MIGRATION_MODES`).
        predictor: says what a split would bring; None: nothing is predicted.
    """

    def __init__(
        self, mode: str, coordinator: MoveCoordinator, predictor: SplitPredictor | None = None
    ) -> None:
        self.mode = mode
        self.coordinator = coordinator
        self.predictor = predictor
        self.proposal: Prediction | None = None

    @classmethod
    def of(cls, args: MigrationArgs, plan: StagePlan) -> "MigrationControl":
        """That of a pipeline that starts with `plan`."""
        coordinator = MoveCoordinator(plan, args.max_layers(plan), args.timeout_s)
        return cls(args.mode, coordinator)

    @classmethod
    def off(cls, plan: StagePlan) -> "MigrationControl":
        """That of a pipeline whose layers stay where they are."""
        return cls.of(MigrationArgs(mode="off"), plan)

    @property
    def history(self) -> tuple[MoveRecord, ...]:
        """The newest moves, oldest first."""
        return tuple(self.coordinator.history)

    def preview(self, layer_counts: Sequence[int]) -> Prediction | None:
        """What the move of `move_to` would bring; None before enough steps were measured.

        Raises MoveRefused, with status 400, for a plan that `move_to` would refuse.
        """
        self._require_on()
        self.coordinator.check(layer_counts)
        if self.predictor is None:
            return None
        return self.predictor.preview(self.coordinator.plan.layer_counts, layer_counts)

    def move_to(self, layer_counts: Sequence[int], now_s: float) -> MoveRecord:
        """Begins the move that an operator wants.

        Raises MoveRefused: 400 for a plan that is none of this pipeline's, 409 while layers move.
        """
        self._require_on()
        return self.coordinator.begin(layer_counts, "operator", now_s)

    def undo(self, now_s: float) -> MoveRecord:
        """Begins the move back to the plan before the newest move.

        Raises MoveRefused as `move_to`, and where nothing has moved.
        """
        return self.coordinator.begin(self.plan_before(), "undo", now_s)

    def plan_before(self) -> tuple[int, ...]:
        """The layer counts that `undo` goes back to. Raises MoveRefused as `undo`."""
        self._require_on()
        done = [one for one in self.history if one.outcome is MoveOutcome.DONE]
        if not done:
            raise MoveRefused("no layer has moved: there is nothing to undo")
        return done[-1].before

    def take_begun(self) -> list[MoveRecord]:
        """The moves that have begun since the last call."""
        return self.coordinator.take_begun()

    def take_ended(self) -> list[MoveRecord]:
        """The moves that have ended since the last call."""
        return self.coordinator.take_ended()

    def take(self, report: MoveReport, now_s: float) -> None:
        """Books what a stage says of the move under way."""
        self.coordinator.take(report, now_s)

    def next_order(
        self, now_s: float, pages_in_use: Callable[[], Sequence[int]]
    ) -> MoveOrder | None:
        """What must be sealed now, if anything; to be asked until it is None."""
        return self.coordinator.next_order(now_s, pages_in_use)

    def note(self, record: StepRecord) -> None:
        """A step has passed all stages."""

    def _require_on(self) -> None:
        if self.mode == "off":
            raise MoveRefused(
                "layers do not move on this server; start it with --migration manual or auto"
            )
