"""Who may move layers, and when: the operator by hand, or the planner by what steps cost.

Owned by `PipelineCore`. The move itself is `migration/coordinator.py`'s.
"""

from collections.abc import Callable, Sequence

from sgl_pipeline.args import MigrationArgs
from sgl_pipeline.errors import MoveRefused
from sgl_pipeline.layer_moves import MoveOrder, MoveReport
from sgl_pipeline.migration.coordinator import MoveCoordinator, MoveOutcome, MoveRecord
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.trace import StepRecord


class MigrationControl:
    """The moves of one pipeline.

    Args:
        mode: `off`, `manual` or `auto` (`args.MIGRATION_MODES`).
    """

    def __init__(self, mode: str, coordinator: MoveCoordinator) -> None:
        self.mode = mode
        self.coordinator = coordinator

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
        self._require_on()
        done = [one for one in self.history if one.outcome is MoveOutcome.DONE]
        if not done:
            raise MoveRefused("no layer has moved: there is nothing to undo")
        return self.coordinator.begin(done[-1].before, "undo", now_s)

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
