"""One layer move at a time, from the wish to the last stage's report that it is done.

A state machine without I/O and clock. It decides which order goes out next and when a move is given
up. It does not know steps: the order stream puts the switch between two of them, and `planner.py`
finds good plans.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence

from sgl_pipeline.errors import MoveRefused, ProtocolError
from sgl_pipeline.records.move_record import MoveOutcome, MoveRecord
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import (
    AbandonMove,
    MoveDone,
    MoveFailed,
    MoveReady,
    MoveReport,
    PrepareMove,
    SwitchPlan,
    most_layers_held,
)
from sgl_pipeline.wire.step_order import INT32

KEPT_RECORDS = 64


class MoveCoordinator:
    """`plan` is the plan of the next steps. `history` holds the newest moves, oldest first.

    Args:
        plan: at the start.
        max_layers: the most layers that each stage may hold at once.
        timeout_s: seconds that the stages may take to get ready.
    """

    def __init__(self, plan: StagePlan, max_layers: Sequence[int], timeout_s: float) -> None:
        assert len(max_layers) == plan.num_stages
        self.plan = plan
        self.max_layers = tuple(max_layers)
        self.history: deque[MoveRecord] = deque(maxlen=KEPT_RECORDS)
        self._timeout_s = timeout_s
        self._next_move = 0
        self._current: MoveRecord | None = None
        self._is_announced = False  # the stages have been sent PrepareMove
        self._answered: set[int] = set()
        self._give_up: str | None = None

    def start_over(self, plan: StagePlan, max_layers: Sequence[int]) -> None:
        """Other stages hold the layers from now on, by `plan`; no move is under way."""
        assert self._current is None and len(max_layers) == plan.num_stages
        self.plan, self.max_layers = plan, tuple(max_layers)

    @property
    def current(self) -> MoveRecord | None:
        """The move under way. Its record changes no more once it is over."""
        return self._current

    def check(self, layer_counts: Sequence[int]) -> None:
        """Raises MoveRefused, with the limit, for a plan that this pipeline cannot change to."""
        counts, plan = tuple(layer_counts), self.plan
        if len(counts) != plan.num_stages or sum(counts) != plan.num_layers:
            raise MoveRefused(
                f"layer_counts {list(counts)} has {sum(counts)} layers in {len(counts)} stages, "
                f"this pipeline has {plan.num_layers} in {plan.num_stages}"
            )
        if min(counts) < 1:
            raise MoveRefused(f"layer_counts {list(counts)}: each stage needs at least one layer")
        if counts == plan.layer_counts:
            raise MoveRefused(f"layer_counts {list(counts)} is the plan already")
        held = most_layers_held(plan, StagePlan(plan.epoch + 1, counts))
        for stage, (most, limit) in enumerate(zip(held, self.max_layers, strict=True)):
            if most > limit:
                raise MoveRefused(
                    f"layer_counts {list(counts)}: stage {stage} would hold {most} layers during "
                    f"the move, it has room for {limit}; move fewer at a time or start with a "
                    "higher --migration-spare-layers"
                )

    def begin(self, layer_counts: Sequence[int], wanted_by: str, now_s: float) -> MoveRecord:
        """Starts a move; `next_order` has its first order.

        Raises MoveRefused while another one is under way, and as `check`.
        """
        if self._current is not None:
            raise MoveRefused(
                f"layers are being moved to {list(self._current.after)} now; wait until that is "
                "done",
                status_code=409,
            )
        self.check(layer_counts)
        record = MoveRecord(
            move=self._next_move,
            epoch=self.plan.epoch + 1,
            wanted_by=wanted_by,
            before=self.plan.layer_counts,
            after=tuple(layer_counts),
            began_s=now_s,
        )
        self._next_move += 1
        self._current, self._is_announced, self._give_up = record, False, None
        self._answered.clear()
        self.history.append(record)
        return record

    def take(self, report: MoveReport, now_s: float) -> None:
        """Applies a stage's report. One on an earlier move is late, and is dropped.

        Raises ProtocolError for one that no stage could send now.
        """
        if report.move >= self._next_move:
            raise ProtocolError(
                f"stage {report.stage} reported on move {report.move}, which is not open"
            )
        record = self._current
        if record is None or report.move < record.move:
            return
        is_switching = record.outcome is MoveOutcome.SWITCHING
        if isinstance(report, MoveDone) != is_switching or report.stage in self._answered:
            raise ProtocolError(
                f"stage {report.stage} sent {type(report).__name__} of move {report.move}, which "
                f"is {record.outcome}"
            )
        self._answered.add(report.stage)
        if isinstance(report, MoveFailed):
            self._give_up = self._give_up or f"stage {report.stage}: {report.message}"
        elif isinstance(report, MoveReady):
            record.load_ms = max(record.load_ms, report.load_ms)
        else:
            record.copied_bytes += report.copied_bytes
            record.patched_bytes += report.patched_bytes
            record.patch_ms = max(record.patch_ms, report.patch_ms)
            record.wait_ms = max(record.wait_ms, report.wait_ms)
            if self._all_answered():
                self._end(MoveOutcome.DONE, now_s)

    def interrupt(self, reason: str, now_s: float) -> None:
        """A stage is lost, and no stage will report on the move under way any more.

        Before its switch it is abandoned. After it the new plan stands: every remaining stage was
        ready for it, and no page of the old plan is of use.
        """
        record = self._current
        if record is None:
            return
        record.reason = reason
        is_switching = record.outcome is MoveOutcome.SWITCHING
        self._end(MoveOutcome.DONE if is_switching else MoveOutcome.ABANDONED, now_s)

    def next_order(
        self,
        now_s: float,
        pages_in_use: Callable[[], Sequence[int]],
        slots_in_use: Callable[[], Sequence[int]],
    ) -> PrepareMove | SwitchPlan | AbandonMove | None:
        """The order to seal now, before any further step. Ask again until it is None. With a
        SwitchPlan `plan` has changed: the next step is the first of its epoch."""
        record = self._current
        if record is None or record.outcome is not MoveOutcome.PREPARING:
            return None
        new = StagePlan(record.epoch, record.after)
        if not self._is_announced:
            self._is_announced = True
            pages, slots = array(INT32, pages_in_use()), array(INT32, slots_in_use())
            return PrepareMove(record.move, new, pages.tobytes(), slots.tobytes())
        if self._give_up is None and now_s - record.began_s > self._timeout_s:
            missing = sorted(set(range(self.plan.num_stages)) - self._answered)
            self._give_up = (
                f"stages {missing} were not ready after {self._timeout_s:g} s "
                "(--migration-timeout-s)"
            )
        if self._give_up is not None:
            record.reason = self._give_up
            self._end(MoveOutcome.ABANDONED, now_s)
            return AbandonMove(record.move)
        if not self._all_answered():
            return None
        self.plan = new
        record.outcome, record.switched_s = MoveOutcome.SWITCHING, now_s
        self._answered.clear()
        return SwitchPlan(record.move, new)

    def _all_answered(self) -> bool:
        return len(self._answered) == self.plan.num_stages

    def _end(self, outcome: MoveOutcome, now_s: float) -> None:
        assert self._current is not None
        self._current.outcome, self._current.ended_s = outcome, now_s
        self._current = None
