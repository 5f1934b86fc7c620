"""This stage's part in one layer move after the other: a state machine that takes the orders.

The stage worker drives it between steps, `test/fault_schedules` in virtual time. It works a
parcel at a time, on request, in the thread of the steps: so no page is read while it is written,
and a stage decides itself how much of its time a move gets.
"""

from array import array
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.layer_moves.incoming_layers import IncomingLayers
from sgl_pipeline.pp_runner.layer_moves.move_site import MoveSite, PageLinks, R
from sgl_pipeline.pp_runner.layer_moves.outgoing_layers import OutgoingLayers
from sgl_pipeline.pp_runner.layer_moves.page_handover import (
    HandoverOrder,
    HandoverReport,
    PageHandover,
)
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import (
    AbandonMove,
    LayerMove,
    MoveDone,
    MoveFailed,
    MoveReady,
    MoveReport,
    PrepareMove,
    SwitchPlan,
    layer_moves,
)
from sgl_pipeline.wire.step_order import INT32

# Reads the time, in seconds.
Clock = Callable[[], float]


@dataclass(slots=True)
class _OpenMove(Generic[R]):
    """The move under way."""

    order: PrepareMove
    began_s: float
    outgoing: list[OutgoingLayers[R]]
    incoming: list[IncomingLayers[R]]
    is_loading: bool
    load_ms: float = 0.0
    patch_ms: float = 0.0
    is_ready: bool = False  # and has reported it
    is_switched: bool = False
    has_failed: bool = False
    new_layers: list[int] = field(default_factory=list)


class LayerMover(Generic[R]):
    """`plan` belongs to the newest steps.

    Args:
        report: takes the stage's reports on its moves.
        clock: for the times in the reports.
    """

    def __init__(
        self,
        stage: int,
        plan: StagePlan,
        site: MoveSite[R],
        links: PageLinks[R],
        report: Callable[[MoveReport | HandoverReport], None],
        clock: Clock,
    ) -> None:
        self.plan = plan
        self._stage = stage
        self._site = site
        self._links = links
        self._report = report
        self._clock = clock
        self._open: _OpenMove[R] | None = None
        # Links of the last move. A socket that is closed with unread messages in it (buffers that
        # the target gave back) may be reset, and data that the target has not read yet may be lost.
        self._used: list[OutgoingLayers[R]] = []
        self._handover = PageHandover(stage, site, links, report)

    @property
    def is_open(self) -> bool:
        """True if a move or a handover in which this worker has a part is under way."""
        return self._open is not None or self._handover.is_open

    @property
    def awaits_pages(self) -> bool:
        """True if the plan has layers here whose pages are still on their way."""
        return self._open is not None and self._open.is_switched

    def obey(self, order: HandoverOrder) -> None:
        """Takes part in the handover of all pages of this stage to another worker.

        Raises ProtocolError as `PageHandover.obey`.
        """
        self._handover.obey(order, self.plan.layers_of(self._stage))

    def prepare(self, order: PrepareMove) -> None:
        """Begins to load and to copy."""
        if self._open is not None:
            raise ProtocolError(
                f"move {order.move} began on stage {self._stage} before move "
                f"{self._open.order.move} was over"
            )
        self._close_used()
        moves = layer_moves(self.plan, order.plan)
        pages, slots = array(INT32, order.pages), array(INT32, order.slots)
        incoming = [
            IncomingLayers(layers, self._site, self._links.receiver(order.move, source))
            for source, layers in _by_stage(
                (one.source, one) for one in moves if one.target == self._stage
            )
        ]
        outgoing = [
            OutgoingLayers(layers, pages, slots, self._site, self._links.sender(order.move, target))
            for target, layers in _by_stage(
                (one.target, one) for one in moves if one.source == self._stage
            )
        ]
        new_layers = [layer for part in incoming for layer in part.layers]
        self._open = _OpenMove(order, self._clock(), outgoing, incoming, bool(new_layers))
        self._open.new_layers = new_layers
        if new_layers:
            self._try(lambda: self._site.begin_loading(new_layers))
        self._look_whether_ready()

    def abandon(self, order: AbandonMove) -> None:
        """Drops all that was prepared."""
        if self._open is not None and self._open.order.move == order.move:
            self._let_go(self._open)
            self._open = None

    def regroup(self, plan: StagePlan) -> None:
        """A stage was lost: ends the move under way, and holds the layers that `plan` gives this
        stage. It is the previous plan or, if the scheduler has sealed the switch, the move's, for
        which this stage was ready. The contents of pages have no meaning any more.
        """
        self._close_used()
        self._handover.close()
        self._site.stop_waiting()
        move, self._open = self._open, None
        if move is None or move.is_switched:
            if move is not None:
                self._close_links(move)
        elif plan.epoch == self.plan.epoch:
            self._let_go(move)
        else:
            self._close_links(move)
            self._site.know_plan(plan)
            self._site.drop(layer for outgoing in move.outgoing for layer in outgoing.layers)
            self.plan = plan
        if self.plan != plan:
            raise ProtocolError(
                f"stage {self._stage} was ordered to regroup under plan {plan.epoch}, it knows "
                f"that of epoch {self.plan.epoch} and was ready for no other"
            )

    def switch(self, order: SwitchPlan) -> None:
        """All steps of the old plan have run here: sends the pages that the targets lack, and is
        ready for the steps of the new one.

        Raises ProtocolError, and as `OutgoingLayers.finish`: then `regroup` comes next.
        """
        move = self._open
        if move is None or move.order.move != order.move or not move.is_ready:
            raise ProtocolError(
                f"stage {self._stage} was ordered to switch to {list(order.plan.layer_counts)}, "
                "for which it is not ready"
            )
        started_s = self._clock()
        for outgoing in move.outgoing:
            outgoing.finish()
        self._used = move.outgoing
        move.patch_ms = (self._clock() - started_s) * 1e3
        self.plan = order.plan
        self._site.know_plan(order.plan)
        self._site.drop(layer for outgoing in move.outgoing for layer in outgoing.layers)
        for incoming in move.incoming:
            self._site.wait_before(incoming.layers, incoming)
        move.is_switched = True
        self._look_whether_done()

    def wrote(self, pages: Collection[int], slots: Collection[int]) -> None:
        """A step has written to these pages and state slots of all layers that it ran, or a load
        has."""
        self._handover.wrote(pages, slots)
        if self._open is not None and not self._open.is_switched:
            for outgoing in self._open.outgoing:
                outgoing.wrote(pages, slots)

    def work(self) -> bool:
        """Does the next small piece of work for the move or the handover; False: there is none
        now."""
        move = self._open
        if move is None or move.has_failed:
            return self._handover.work()
        if move.is_loading:
            self._try(self._take_loaded)
            if move.has_failed:
                return False
        did_work = False
        for outgoing in move.outgoing if not move.is_switched else ():
            did_work |= outgoing.work()
        for incoming in move.incoming if not move.is_loading else ():
            did_work |= incoming.work()
        self._look_whether_ready()
        self._look_whether_done()
        return did_work

    def work_for(self, seconds: float) -> None:
        """Works until `seconds` have passed, or there is nothing to do."""
        end_s = self._clock() + seconds
        while self._clock() < end_s and self.work():
            pass

    def close(self) -> None:
        """Closes all links, and ends all loading."""
        self._site.close()
        self._close_used()
        self._handover.close()
        if self._open is not None:
            self._close_links(self._open)
            self._open = None

    def _take_loaded(self) -> None:
        assert self._open is not None
        if self._site.has_loaded():
            self._site.hold(self._open.new_layers)
            self._open.load_ms = (self._clock() - self._open.began_s) * 1e3
            self._open.is_loading = False

    def _try(self, prepare: Callable[[], None]) -> None:
        """Runs `work`; a failure before the switch costs the move and nothing else."""
        assert self._open is not None
        try:
            prepare()
        except Exception as error:
            self._let_go(self._open)
            self._open.has_failed = True
            message = f"{type(error).__name__}: {error}"
            self._report(MoveFailed(stage=self._stage, move=self._open.order.move, message=message))

    def _let_go(self, move: _OpenMove[R]) -> None:
        self._close_links(move)
        self._site.drop(move.new_layers)

    def _close_used(self) -> None:
        for outgoing in self._used:
            outgoing.close()
        self._used = []

    @staticmethod
    def _close_links(move: _OpenMove[R]) -> None:
        for outgoing in move.outgoing:
            outgoing.close()
        for incoming in move.incoming:
            incoming.close()

    def _look_whether_ready(self) -> None:
        move = self._open
        if move is None or move.is_ready or move.has_failed or move.is_loading:
            return
        if all(outgoing.is_ready for outgoing in move.outgoing):
            move.is_ready = True
            self._report(
                MoveReady(
                    stage=self._stage,
                    move=move.order.move,
                    load_ms=move.load_ms,
                )
            )

    def _look_whether_done(self) -> None:
        move = self._open
        if move is None or not move.is_switched:
            return
        if all(incoming.has_all for incoming in move.incoming):
            self._report(
                MoveDone(
                    stage=self._stage,
                    move=move.order.move,
                    copied_bytes=sum(outgoing.copied_bytes for outgoing in move.outgoing),
                    patched_bytes=sum(outgoing.patched_bytes for outgoing in move.outgoing),
                    patch_ms=move.patch_ms,
                    wait_ms=sum(incoming.wait_s for incoming in move.incoming) * 1e3,
                )
            )
            self._open = None


def _by_stage(moves: Iterable[tuple[int, LayerMove]]) -> list[tuple[int, list[int]]]:
    """The layers of each other stage; moves are ascending by layer, hence by stage."""
    return [
        (stage, [one.layer for _, one in group])
        for stage, group in groupby(moves, key=lambda pair: pair[0])
    ]
