"""Layers that move between stages that only take time.

Driven by `virtual_pipeline.py` with the orders that the core gives out, and with each step on each
stage. Answers as the stages do (`pp_runner/layer_moves/layer_mover.py`): `MoveReady` when weights
and pages are over, `MoveDone` when the patch is. A stage's future is known up to its last step, so
an answer's moment is that of a stage which stays idle; a further step puts it off.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from sgl_pipeline.simulator.page_copies import PARCEL_BYTES, MoveCosts, PageCopy
from sgl_pipeline.simulator.stage_clock import StageClock
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import (
    MOVE_SHARE,
    AbandonMove,
    MoveDone,
    MoveOrder,
    MoveReady,
    MoveReport,
    PrepareMove,
    SwitchPlan,
    layer_moves,
)

_INT32_BYTES = 4


@dataclass(slots=True)
class _VirtualMove:
    """The move under way; `began_s[s]` is when stage `s` took the newest order of it."""

    move: int
    began_s: list[float]
    loaded_s: list[float]
    load_s: list[float]
    copies: list[PageCopy]
    patch_s: list[float]
    wait_s: list[float]
    is_switched: bool = False
    awaiting: set[int] = field(default_factory=set)  # stages whose next step waits for pages
    answered: set[int] = field(default_factory=set)

    def of_source(self, stage: int) -> Iterator[PageCopy]:
        return (copy for copy in self.copies if copy.source == stage)

    def of_target(self, stage: int) -> Iterator[PageCopy]:
        return (copy for copy in self.copies if copy.target == stage)


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
        self._open: _VirtualMove | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @property
    def page_size(self) -> int:
        """In tokens."""
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

    def ran(self, stage: int, compute_s: float, done_s: float, pages: list[int]) -> float:
        """A step has run on a stage and has written to `pages`; returns when the stage is free, for
        it copies a little between two steps."""
        move = self._open
        if move is None or move.is_switched:
            return done_s
        if self._costs.copying == "beside":
            for copy in move.of_source(stage):
                copy.send(copy.looked_s, done_s)
                copy.looked_s = max(copy.looked_s, done_s)
                copy.wrote(pages)
            return done_s
        for copy in move.of_source(stage):
            copy.wrote(pages)
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
        reports = [self._report(move, stage) for _, stage in due]
        move.answered.update(stage for _, stage in due)
        if move.is_switched and len(move.answered) == len(self._clocks):
            self._open = None
        return reports

    def _prepare(self, order: PrepareMove, sent_s: float) -> None:
        assert self._open is None, "a move began before the last one was over"
        num_pages = len(order.pages) // _INT32_BYTES
        ways = [
            (way, tuple(one.layer for one in group))
            for way, group in groupby(
                layer_moves(self._plan, order.plan), key=lambda one: (one.source, one.target)
            )
        ]
        began_s = [max(clock.free_s, sent_s) for clock in self._clocks]
        load_s = [0.0] * len(began_s)
        for (_, target), layers in ways:
            load_s[target] += self._costs.load_s(len(layers))
        loaded_s = [began + load for began, load in zip(began_s, load_s, strict=True)]
        copies = [
            PageCopy(
                self._costs,
                layers,
                source,
                target,
                num_pages,
                # A target takes up no page before the layers are there.
                begins_s=max(began_s[source], loaded_s[target]) + self._costs.latency_s,
            )
            for (source, target), layers in ways
        ]
        zeros = [0.0] * len(began_s)
        self._open = _VirtualMove(
            order.move, began_s, loaded_s, load_s, copies, zeros.copy(), zeros.copy()
        )

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
        move: _VirtualMove,
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
        """The moments of the reports of stages that have not answered."""
        move = self._open
        if move is None:
            return
        for stage, clock in enumerate(self._clocks):
            if stage not in move.answered:
                at_s = self._done_s if move.is_switched else self._ready_s
                yield at_s(move, stage, clock.free_s) + self._transit_s, stage

    def _ready_s(self, move: _VirtualMove, stage: int, free_s: float) -> float:
        ready_s = max(move.began_s[stage], move.loaded_s[stage])
        now_s = free_s
        for copy in move.of_source(stage):
            since_s = copy.looked_s if self._costs.copying == "beside" else now_s
            now_s = copy.sent_if_idle(since_s)
            ready_s = max(ready_s, now_s if copy.ready_s is None else copy.ready_s)
        return ready_s

    def _done_s(self, move: _VirtualMove, stage: int, free_s: float) -> float:
        done_s = move.began_s[stage]
        for copy in move.of_target(stage):
            done_s = max(done_s, copy.has_all_if_idle(free_s))
        return done_s

    def _report(self, move: _VirtualMove, stage: int) -> MoveReport:
        if not move.is_switched:
            return MoveReady(stage=stage, move=move.move, load_ms=move.load_s[stage] * 1e3)
        return MoveDone(
            stage=stage,
            move=move.move,
            copied_bytes=int(sum(copy.copied_bytes for copy in move.of_source(stage))),
            patched_bytes=int(sum(copy.patch_bytes for copy in move.of_source(stage))),
            patch_ms=move.patch_s[stage] * 1e3,
            wait_ms=move.wait_s[stage] * 1e3,
        )
