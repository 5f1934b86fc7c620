"""A stage that is ready obeys orders until it is told to stop or gets another stage.

The tables in `ReadyStage.__init__` are the protocol: a message that is not in them is refused.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.base.step_inputs import written_pages, written_slots
from sgl_pipeline.pp_runner.layer_moves.layer_mover import LayerMover
from sgl_pipeline.pp_runner.leave_signal import LeaveSignal
from sgl_pipeline.pp_runner.links.activation_link import NeighborGone
from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.pp_runner.pending_reports import PendingReports
from sgl_pipeline.pp_runner.stage_profile import StageProfile
from sgl_pipeline.pp_runner.stage_runner import StageRunner
from sgl_pipeline.pp_runner.worker_inbox import RegroupDue, WorkerInbox
from sgl_pipeline.wire.channels import WorkerEnd
from sgl_pipeline.wire.lease_orders import EndLease, LendPages
from sgl_pipeline.wire.move_orders import MOVE_SHARE, AbandonMove, PrepareMove, SwitchPlan
from sgl_pipeline.wire.stage_messages import (
    FinishHandover,
    HandPagesOver,
    Regroup,
    Shutdown,
    StageAssignment,
    StartProfile,
    StopProfile,
    TakePagesOver,
    ToWorker,
    WorkerLeaves,
)
from sgl_pipeline.wire.stage_orders import OrderReader, SealedOrder
from sgl_pipeline.wire.step_order import MirrorSnapshot, StepOrder
from sgl_pipeline.wire.store_orders import (
    EndLoad,
    LoadPages,
    OfferPages,
    SavePages,
    UseStore,
    WithdrawPages,
)

# A GPU that has a step to run and one to follow never waits for the host. A third step that the
# host launched would wait in FlashInfer's plan for the first of them.
MAX_PENDING_REPORTS = 2
# ZeroMQ's own timeouts are whole milliseconds, which is as long as a step of decodes.
PENDING_POLL_S = 50e-6
MOVE_POLL_S = 0.5e-3
# A worker without orders checks this often whether it was asked to go.
LEAVE_POLL_MS = 100


class ReadyStage:
    """One stage from its readiness to its end.

    Args:
        worker: the number of its worker.
        regroup: has the stage join the stages that are left and those that replace the others.
        leave: the way in which the worker is asked to go; None: it never is.
    """

    def __init__(
        self,
        worker: int,
        channel: WorkerEnd,
        inbox: WorkerInbox,
        runner: StageRunner,
        mover: LayerMover[torch.Tensor],
        transfers: PageTransfers,
        profile: StageProfile,
        regroup: Callable[[Regroup], None],
        leave: LeaveSignal | None = None,
    ) -> None:
        self._worker = worker
        self._channel = channel
        self._inbox = inbox
        self._runner = runner
        self._mover = mover
        self._transfers = transfers
        self._profile = profile
        self._leave = leave
        self._orders = OrderReader()
        self._pending = PendingReports(channel.send)
        self._on_order: dict[type, Callable[[Any], None]] = {
            StepOrder: self._run_step,
            MirrorSnapshot: runner.restore,
            PrepareMove: mover.prepare,
            SwitchPlan: self._interrupting(self._switch),
            AbandonMove: mover.abandon,
            UseStore: self._use_store,
            SavePages: transfers.obey,
            LoadPages: transfers.obey,
            EndLoad: transfers.obey,
            OfferPages: transfers.obey_offer,
            WithdrawPages: transfers.obey_offer,
            LendPages: transfers.obey_lease,
            EndLease: transfers.obey_lease,
        }
        self._on_message: dict[type, Callable[[Any], None]] = {
            Regroup: self._interrupting(regroup),
            HandPagesOver: mover.obey,
            TakePagesOver: mover.obey,
            FinishHandover: self._finish_handover,
            StartProfile: self._start_profile,
            StopProfile: self._stop_profile,
        }

    def serve(self) -> StageAssignment | None:
        """Obeys orders until a `Shutdown`, or until the worker is given another stage, which it
        returns.

        Raises ProtocolError for a message that a ready stage does not expect, and whatever a step
        fails with.
        """
        while not isinstance(message := self._next_message(), Shutdown):
            if isinstance(message, StageAssignment):
                self._profile.stop()
                return message
            self._obey(message)
        self._pending.send_all_but(0)
        return None

    def _obey(self, message: ToWorker | None) -> None:
        """Every order but the next step waits for the reports that are pending."""
        order: object = message
        table = self._on_message
        if isinstance(message, SealedOrder):
            order, table = self._orders.open(message), self._on_order
        if not isinstance(order, StepOrder):
            self._pending.send_all_but(0)
        handler = table.get(type(order))
        if handler is None:
            raise ProtocolError(f"a ready stage received {type(message).__name__}")
        # The message for which a step, a switch or a handover is dropped comes next.
        with contextlib.suppress(RegroupDue):
            handler(order)

    def _interrupting(self, obey: Callable[[Any], None]) -> Callable[[Any], None]:
        """`obey`, before which all transfers of pages, offers and leases are forgotten."""

        def interrupt_and_obey(order: object) -> None:
            self._transfers.cancel()
            obey(order)

        return interrupt_and_obey

    def _switch(self, order: SwitchPlan) -> None:
        """Raises RegroupDue where the switch must be dropped."""
        self._mover.switch(order)
        self._send_rest()

    def _send_rest(self) -> None:
        """Sends what other stages lack, as they take it up. Raises RegroupDue where the stages
        regroup instead."""
        while not self._mover.send_rest():
            self._inbox.attend_for(MOVE_POLL_S)

    def _use_store(self, order: UseStore) -> None:
        """Begins with another store and other peers, which also have what they have lent."""
        self._transfers.obey(order)
        if order.peers:  # without any no page is loaded now, and attention of leases goes on
            self._runner.offload.use(order.peers)

    def _finish_handover(self, order: FinishHandover) -> None:
        """Refuses transfers first: a load fills pages that the other worker does not get. Raises as
        `_send_rest`."""
        self._report_transfers()
        for report in self._transfers.refuse_open("the stage is handed over to another worker"):
            self._channel.send(report)
        self._mover.obey(order)
        self._send_rest()

    def _start_profile(self, order: StartProfile) -> None:
        self._channel.send(self._profile.start(order))

    def _stop_profile(self, order: StopProfile) -> None:
        self._channel.send(self._profile.stop())

    def _next_message(self) -> ToWorker | None:
        """Waits for the next message.

        While reports are pending, the stage polls for both in turns: each waits no longer than
        `PENDING_POLL_S` and the kernel's timer slack, 0.1 ms together; a report also waits while a
        step is prepared or launched. While layers move, the stage works on that meanwhile. While
        pages come from a store or go there, the end of a transfer wakes it.
        """
        self._leave_if_asked()
        self._report_transfers()
        while self._pending or self._mover.is_open or self._transfers.is_open:
            self._pending.send_ready()
            self._leave_if_asked()
            if (message := self._inbox.next(timeout_ms=0)) is not None:
                return message
            self._work_or_wait()
            self._report_transfers()
        if self._leave is None:
            return self._inbox.next()
        while (message := self._inbox.next(LEAVE_POLL_MS)) is None:
            self._leave_if_asked()
        return message

    def _work_or_wait(self) -> None:
        """Does a piece of work for a move, or waits for what may come beside messages."""
        if self._mover.work():
            return
        if self._pending:
            time.sleep(PENDING_POLL_S)
        elif self._mover.is_open:
            time.sleep(MOVE_POLL_S)
        else:
            self._inbox.wait_beside(self._transfers.descriptor, timeout_s=LEAVE_POLL_MS * 1e-3)

    def _report_transfers(self) -> None:
        """Sends the reports of transfers that have ended. A move or a handover may have copied a
        page before a load has filled it."""
        if self._transfers.is_open:
            for report, filled_pages in self._transfers.take_reports():
                self._mover.wrote(filled_pages, ())
                self._channel.send(report)

    def _leave_if_asked(self) -> None:
        if self._leave is not None and self._leave.take():
            self._channel.send(WorkerLeaves(self._worker))

    def _run_step(self, order: StepOrder) -> None:
        """Raises RegroupDue where the step must be dropped."""
        runner, mover, pending = self._runner, self._mover, self._pending
        pending.send_all_but(MAX_PENDING_REPORTS - 1)
        try:
            step = runner.prepare(order, self._inbox.attend_for)
            pending.send_ready()
            self._await_rows()
            started_s = time.monotonic()
            pending.add(runner.launch(step))
        except NeighborGone:
            self._inbox.wait_for_the_end()
        if mover.is_open:
            chunks = [*step.replayed, *step.chunks]
            mover.wrote(written_pages(chunks, runner.page_size), written_slots(chunks))
            mover.work_for(MOVE_SHARE * (time.monotonic() - started_s))
        if self._profile.ends_with_this_step:
            pending.send_all_but(0)
        if (reply := self._profile.step_done()) is not None:
            self._channel.send(reply)

    def _await_rows(self) -> None:
        """Returns when the step that was prepared can be launched. Upstream may be far from done
        with it; reports, layers and the scheduler's messages do not wait for that."""
        while not self._runner.can_launch():
            self._inbox.attend()
            self._report_transfers()
            if not (self._pending or self._mover.is_open):
                descriptors = self._runner.rows_descriptor, self._transfers.descriptor
                self._inbox.wait_beside(*descriptors)
                continue
            if not self._mover.work():
                time.sleep(PENDING_POLL_S)
            self._pending.send_ready()
