"""Controls who moves layers, and when: the operator by hand, or the planner by step costs.

`migration/coordinator.py` carries out the move itself.
"""

from collections.abc import Callable, Sequence
from copy import copy

from sgl_pipeline.args import MigrationArgs
from sgl_pipeline.errors import MoveRefused
from sgl_pipeline.migration.coordinator import MoveCoordinator
from sgl_pipeline.migration.planner import LayerPlanner
from sgl_pipeline.migration.planner_args import MoveProposal
from sgl_pipeline.migration.predictor import PartTimes
from sgl_pipeline.records.event import Event
from sgl_pipeline.records.move_record import MoveOutcome, MoveRecord
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import (
    MOVE_SHARE,
    MoveOrder,
    MoveReport,
    layer_moves,
)

WHY_OFF = "start it with --migration manual or auto"


class MigrationControl:
    """The moves of one pipeline.

    Args:
        mode: `off`, `manual` or `auto` (`args.MIGRATION_MODES`).
        planner: learns from the steps; None: nothing is predicted or proposed.

    While `is_held`, a stage goes to another worker with the layers that it has: no move begins.
    `events` gets a copy of each move's record as it begins, and the record when it is over; it is
    the list of the `PipelineCore` that has this control.
    """

    def __init__(
        self, mode: str, coordinator: MoveCoordinator, planner: LayerPlanner | None = None
    ) -> None:
        self.mode = mode
        self.coordinator = coordinator
        self.planner = planner
        self.is_held = False
        self.events: list[Event] = []
        self._proposed: tuple[int, ...] | None = None  # for the plan in use

    @classmethod
    def of(
        cls, args: MigrationArgs, plan: StagePlan, planner: LayerPlanner | None = None
    ) -> "MigrationControl":
        """The control of a pipeline that starts with `plan`."""
        coordinator = MoveCoordinator(plan, args.max_layers(plan), args.timeout_s)
        return cls(args.mode, coordinator, planner)

    @classmethod
    def off(cls, plan: StagePlan) -> "MigrationControl":
        """The control of a pipeline whose layers never move."""
        return cls.of(MigrationArgs(mode="off"), plan)

    @property
    def history(self) -> tuple[MoveRecord, ...]:
        """The newest moves, oldest first."""
        return tuple(self.coordinator.history)

    @property
    def proposal(self) -> MoveProposal | None:
        """The planner's last proposal for the plan in use, if by the steps since then it is still
        worth the move."""
        if self.planner is None or self._proposed is None:
            return None
        return self.planner.worthwhile(self.coordinator.plan.layer_counts, self._proposed)

    @property
    def is_moving(self) -> bool:
        """True if layers move, or are about to."""
        return self.coordinator.current is not None

    @property
    def is_switching(self) -> bool:
        """True if steps run under a new plan, and some stage may lack pages of its layers."""
        current = self.coordinator.current
        return current is not None and current.outcome is MoveOutcome.SWITCHING

    def preview(self, layer_counts: Sequence[int]) -> MoveProposal | None:
        """The effect of the move of `move_to`; None before enough steps were measured.

        Raises MoveRefused, with status 400, for a plan that `move_to` would refuse.
        """
        self._require_on()
        self.coordinator.check(layer_counts)
        if self.planner is None:
            return None
        return self.planner.preview(self.coordinator.plan.layer_counts, layer_counts)

    def move_to(self, layer_counts: Sequence[int], now_s: float) -> MoveRecord:
        """Begins the move that an operator wants.

        Raises MoveRefused: 400 for a plan that this pipeline cannot have, 409 while layers move or
        a stage is handed over.
        """
        self._require_on()
        self._require_free()
        return self._begin(layer_counts, "operator", now_s)

    def undo(self, now_s: float) -> MoveRecord:
        """Begins the move back to the plan before the newest move.

        Raises MoveRefused as `move_to`, and if nothing has moved.
        """
        counts = self.plan_before()
        self._require_free()
        return self._begin(counts, "undo", now_s)

    def plan_before(self) -> tuple[int, ...]:
        """The layer counts that `undo` goes back to. Raises MoveRefused as `undo`."""
        self._require_on()
        done = [one for one in self.history if one.outcome is MoveOutcome.DONE]
        if not done:
            raise MoveRefused("no layer has moved: there is nothing to undo")
        return done[-1].before

    def take(self, report: MoveReport, now_s: float) -> None:
        """Applies a stage's report on the move under way. Raises ProtocolError for one that no
        stage could send now."""
        current = self.coordinator.current
        self.coordinator.take(report, now_s)
        self._note_end(current)

    def interrupt(self, reason: str, now_s: float) -> None:
        """A stage is lost, with whatever move is under way."""
        current = self.coordinator.current
        self.coordinator.interrupt(reason, now_s)
        self._note_end(current)

    def start_over(self, plan: StagePlan, max_layers: tuple[int, ...], now_s: float) -> None:
        """Other stages hold the layers from now on, by `plan`. A move that was requested while no
        step ran is abandoned.

        Args:
            max_layers: the most layers that each of them may hold at once.
        """
        self.interrupt(f"{plan.num_stages} stages share the layers now", now_s)
        self.coordinator.start_over(plan, max_layers)
        self._proposed = None
        if self.planner is not None:
            self.planner.start_over(plan, max_layers)

    def next_order(
        self,
        now_s: float,
        pages_in_use: Callable[[], Sequence[int]],
        slots_in_use: Callable[[], Sequence[int]],
    ) -> MoveOrder | None:
        """The order that must be sealed now, if there is one; to be asked until it is None."""
        current = self.coordinator.current
        order = self.coordinator.next_order(now_s, pages_in_use, slots_in_use)
        self._note_end(current)
        return order

    def note(self, parts: PartTimes, now_s: float) -> None:
        """A step of these predicted times has ended. In mode `auto` a move may begin now."""
        if self.planner is None:
            return
        self.planner.note(parts)
        if self.coordinator.current is not None:
            return
        proposal = self.planner.proposal(self.coordinator.plan.layer_counts)
        if proposal is None:
            return
        self._proposed = proposal.layer_counts
        if self.mode == "auto" and not self.is_held:
            self._begin(proposal.layer_counts, "auto", now_s)

    def _begin(self, layer_counts: Sequence[int], wanted_by: str, now_s: float) -> MoveRecord:
        record = self.coordinator.begin(layer_counts, wanted_by, now_s)
        self.events.append(copy(record))
        return record

    def _note_end(self, record: MoveRecord | None) -> None:
        """Reports the move that was under way, if it is over now. The planner learns from it:
        the time that steps waited, and the stages' share of the time before that."""
        if record is None or not record.is_over:
            return
        self.events.append(record)
        self._proposed = None
        if self.planner is None:
            return
        self.planner.moved()
        if record.switched_s is not None and not record.reason:
            stalled_s = record.gap_ms * 1e-3
            shared_s = MOVE_SHARE * (record.switched_s - record.began_s)
            old, new = (StagePlan(0, counts) for counts in (record.before, record.after))
            self.planner.prices.learn(
                [one.layer for one in layer_moves(old, new)],
                stalled_s=stalled_s,
                shared_s=shared_s,
                patched_bytes=record.patched_bytes,
            )

    def _require_on(self) -> None:
        if self.mode == "off":
            raise MoveRefused(f"layers do not move on this server; {WHY_OFF}")

    def _require_free(self) -> None:
        if self.is_held:
            raise MoveRefused(
                "a stage is being handed over to another worker; wait until that is done",
                status_code=409,
            )
