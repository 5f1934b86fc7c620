"""This stage's part in one layer move after the other: a state machine that takes the orders.

The stage worker drives it between steps, `test/fault_schedules` in virtual time. It works a
parcel at a time, on request, in the thread of the steps: so no page is read while it is written,
and a stage decides itself how much of its time a move gets. It never waits: who drives it does.
"""

from collections.abc import Callable, Collection
from typing import Generic

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.layer_moves.move_site import MoveSite, PageLinks, R
from sgl_pipeline.pp_runner.layer_moves.open_move import OpenMove
from sgl_pipeline.pp_runner.layer_moves.outgoing_layers import OutgoingLayers
from sgl_pipeline.pp_runner.layer_moves.page_handover import (
    HandoverOrder,
    HandoverReport,
    PageHandover,
)
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import (
    AbandonMove,
    MoveFailed,
    MoveReady,
    MoveReport,
    PrepareMove,
    SwitchPlan,
)

# Reads the time, in seconds.
Clock = Callable[[], float]


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
        self._open: OpenMove[R] | None = None
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

    @property
    def has_rest(self) -> bool:
        """True from `switch`, or the end of a handover, until `send_rest` has sent all: the stage
        obeys nothing but `regroup` meanwhile."""
        move = self._open
        is_switching = move is not None and move.switch is not None and not move.is_switched
        return is_switching or self._handover.has_rest

    def obey(self, order: HandoverOrder) -> None:
        """Takes part in the handover of all pages of this stage to another worker. Its end has a
        rest to send.

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
        self._open = move = OpenMove.of(
            order, self._stage, self.plan, self._site, self._links, self._clock()
        )
        if move.is_loading:
            self._try(lambda: self._site.begin_loading(move.new_layers))
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
                move.close_links()
        elif plan.epoch == self.plan.epoch:
            self._let_go(move)
        else:
            move.close_links()
            self._site.know_plan(plan)
            self._site.drop(move.leaving_layers)
            self.plan = plan
        if self.plan != plan:
            raise ProtocolError(
                f"stage {self._stage} was ordered to regroup under plan {plan.epoch}, it knows "
                f"that of epoch {self.plan.epoch} and was ready for no other"
            )

    def switch(self, order: SwitchPlan) -> None:
        """All steps of the old plan have run here. `send_rest` comes next, until it has sent what
        the targets lack: then the stage is ready for the steps of the new one.

        Raises ProtocolError.
        """
        move = self._open
        if move is None or move.order.move != order.move or not move.is_ready:
            raise ProtocolError(
                f"stage {self._stage} was ordered to switch to {list(order.plan.layer_counts)}, "
                "for which it is not ready"
            )
        move.begin_switch(order, self._clock())

    def send_rest(self) -> bool:
        """Sends as much of the rest of a switch or a handover as there is room for; True when all
        is sent.

        Stages never wait for room in a circle: layers cross a boundary in one direction, and a step
        waits for pages only when all stages upstream have switched.
        """
        if self._handover.has_rest:
            return self._handover.send_rest()
        move = self._open
        if move is None or move.switch is None or move.is_switched:
            return True
        if not move.send_rest():
            return False
        move.patch_ms = (self._clock() - move.switch_began_s) * 1e3
        self._used = move.outgoing
        self.plan = move.switch.plan
        self._site.know_plan(self.plan)
        self._site.drop(move.leaving_layers)
        for incoming in move.incoming:
            self._site.wait_before(incoming.layers, incoming)
        move.is_switched = True
        self._look_whether_done()
        return True

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
        did_work = move.work()
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
            self._open.close_links()
            self._open = None

    def _take_loaded(self) -> None:
        assert self._open is not None
        if self._site.has_loaded():
            self._site.hold(self._open.new_layers)
            self._open.load_ms = (self._clock() - self._open.began_s) * 1e3
            self._open.is_loading = False

    def _try(self, prepare: Callable[[], None]) -> None:
        """Runs `prepare`; a failure before the switch costs the move and nothing else."""
        assert self._open is not None
        try:
            prepare()
        except Exception as error:
            self._let_go(self._open)
            self._open.has_failed = True
            message = f"{type(error).__name__}: {error}"
            self._report(MoveFailed(stage=self._stage, move=self._open.order.move, message=message))

    def _let_go(self, move: OpenMove[R]) -> None:
        move.close_links()
        self._site.drop(move.new_layers)

    def _close_used(self) -> None:
        for outgoing in self._used:
            outgoing.close()
        self._used = []

    def _look_whether_ready(self) -> None:
        move = self._open
        if move is None or move.is_ready or move.has_failed or not move.has_sent_once:
            return
        move.is_ready = True
        self._report(MoveReady(stage=self._stage, move=move.order.move, load_ms=move.load_ms))

    def _look_whether_done(self) -> None:
        report = None if self._open is None else self._open.done(self._stage)
        if report is not None:
            self._report(report)
            self._open = None
