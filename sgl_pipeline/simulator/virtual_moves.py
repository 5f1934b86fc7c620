"""Layers that move between stages that only take time.

Driven by `virtual_pipeline.py` with the orders that the core gives out, and with each step on each
stage. Answers as the stages do (`pp_runner/layer_moves/layer_mover.py`): `MoveReady` when weights
and pages are over, `MoveDone` when the patch is. A stage's future is known up to its last step, so
an answer's moment is that of a stage which stays idle; a further step puts it off.
"""

from collections.abc import Iterator, Sequence

from sgl_pipeline.simulator.page_copies import PARCEL_BYTES, MoveCosts
from sgl_pipeline.simulator.stage_clock import StageClock
from sgl_pipeline.simulator.virtual_move import VirtualMove, WrittenPlaces
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import (
    MOVE_SHARE,
    AbandonMove,
    MoveOrder,
    MoveReport,
    PrepareMove,
    SwitchPlan,
)


class VirtualMoves:
    """The stages' part in one move after the other.

    Args:
        plan: at the start.
        clocks: of the stages; a move takes time of them.
        transit_s: what an order and its answer are on their way, together.
    """

    def __init__(
        self, costs: MoveCosts, plan: StagePlan, clocks: Sequence[StageClock], transit_s: float
    ) -> None:
        self._costs = costs
        self._plan = plan
        self._clocks = clocks
        self._transit_s = transit_s
        self._open: VirtualMove | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._costs.page_size

    @property
    def is_copying(self) -> bool:
        """True if pages are copied while steps of the old plan run."""
        return self._open is not None and not self._open.is_switched

    def take(self, order: MoveOrder, sent_s: float) -> None:
        """An order to all stages, each of which takes it after the steps before it."""
        if isinstance(order, PrepareMove):
            self._prepare(order, sent_s)
        elif isinstance(order, AbandonMove):
            self._open = None
        else:
            self._switch(order, sent_s)

    def idle(self, stage: int, until_s: float) -> None:
        """The stage had nothing to run from its clock's `free_s` until then: it copies."""
        move, free_s = self._open, self._clocks[stage].free_s
        if move is None or self._costs.copying == "beside":
            return
        self._copy(move, stage, free_s, until_s)

    def wait(self, stage: int, now_s: float) -> float:
        """A step has reached the first layer that has come to this stage, or would have; returns
        when it can go on."""
        move = self._open
        if move is None or not move.is_switched or stage not in move.awaiting:
            return now_s
        move.awaiting.discard(stage)
        goes_on_s = now_s
        for copy in move.of_target(stage):
            goes_on_s = copy.wait(goes_on_s)
        move.wait_s[stage] = goes_on_s - now_s
        return goes_on_s

    def first_new_layer(self, stage: int) -> int | None:
        """The first layer whose pages the next step on this stage has to wait for."""
        move = self._open
        if move is None or not move.is_switched or stage not in move.awaiting:
            return None
        return min(copy.layers[0] for copy in move.of_target(stage))

    def ran(self, stage: int, compute_s: float, done_s: float, written: WrittenPlaces) -> float:
        """A step has run on a stage and has `written`; returns when the stage is free, for it
        copies a little between two steps."""
        move = self._open
        if move is None or move.is_switched:
            return done_s
        if self._costs.copying == "beside":
            for copy in move.of_source(stage):
                copy.send(copy.looked_s, done_s)
                copy.looked_s = max(copy.looked_s, done_s)
                copy.wrote(*written)
            return done_s
        for copy in move.of_source(stage):
            copy.wrote(*written)
        until_s = done_s + MOVE_SHARE * compute_s
        return self._copy(move, stage, done_s, until_s, self._costs.slice_bytes)

    def delay_transfer(self, stage: int, transfer_s: float) -> float:
        """Seconds for which the rows of a step that leaves `stage` wait for a parcel on a shared
        link; pages wait for all of `transfer_s`."""
        if not self._costs.shares_links or not self.is_copying:
            return 0.0
        assert self._open is not None
        delay_s = 0.0
        for copy in self._open.copies:
            if copy.queued_bytes and stage in (copy.source, copy.target - 1):
                copy.debt_s += transfer_s
                delay_s = self._costs.copy_s(min(PARCEL_BYTES, copy.queued_bytes))
        return delay_s

    def next_report_s(self) -> float:
        """The moment of the next stage's report, if no step is sent until then."""
        return min((moment_s for moment_s, _ in self._due()), default=float("inf"))

    def take_reports(self, now_s: float) -> list[MoveReport]:
        """The reports that have arrived by `now_s`."""
        move = self._open
        if move is None:
            return []
        due = sorted((moment_s, stage) for moment_s, stage in self._due() if moment_s <= now_s)
        reports = [move.report(stage) for _, stage in due]
        move.answered.update(stage for _, stage in due)
        if move.is_switched and len(move.answered) == len(self._clocks):
            self._open = None
        return reports

    def _prepare(self, order: PrepareMove, sent_s: float) -> None:
        assert self._open is None, "a move began before the last one was over"
        began_s = [max(clock.free_s, sent_s) for clock in self._clocks]
        self._open = VirtualMove.of(self._costs, order, self._plan, began_s)

    def _switch(self, order: SwitchPlan, sent_s: float) -> None:
        move = self._open
        assert move is not None and len(move.answered) == len(self._clocks)
        if self._costs.copying == "stage":
            for stage, clock in enumerate(self._clocks):
                self._copy(move, stage, clock.free_s, sent_s)
            for copy in move.copies:
                copy.took_s = sent_s
        for stage, clock in enumerate(self._clocks):
            started_s = sent_on_s = max(clock.free_s, sent_s)
            for copy in move.of_source(stage):
                if self._costs.copying == "beside":
                    copy.send(copy.looked_s, started_s)
                sent_on_s = copy.finish(sent_on_s)
            move.patch_s[stage] = sent_on_s - started_s
            if self._costs.shares_links and sent_on_s > started_s:
                clock.link_free_s = max(clock.link_free_s, started_s) + sent_on_s - started_s
            move.began_s[stage] = started_s
            if self._costs.copying == "stage" and sent_on_s > started_s:
                clock.free_s = sent_on_s
        move.is_switched = True
        move.awaiting = {copy.target for copy in move.copies}
        move.answered.clear()
        self._plan = order.plan

    def _copy(
        self,
        move: VirtualMove,
        stage: int,
        since_s: float,
        until_s: float,
        most_bytes: float = float("inf"),
    ) -> float:
        """The stage's own time for pages, first for those that go; returns when it ended."""
        now_s = since_s
        if not move.is_switched:
            for copy in move.of_source(stage):
                now_s = copy.send(now_s, until_s, most_bytes)
        for copy in move.of_target(stage):
            now_s = copy.take(now_s, until_s, most_bytes)
        return now_s

    def _due(self) -> Iterator[tuple[float, int]]:
        """The moments at which reports of stages arrive that have not answered."""
        if self._open is not None:
            for answer_s, stage in self._open.due([clock.free_s for clock in self._clocks]):
                yield answer_s + self._transit_s, stage
