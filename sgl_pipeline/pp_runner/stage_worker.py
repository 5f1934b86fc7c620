"""The stage worker: connects, loads what it is assigned, runs step plans until told to stop.

Run by `stage_process.py`. It connects to the scheduler by address and learns its position from a
`StageAssignment`. It is the conversation only: a step itself is run by `stage_runner.py`.
"""

import contextlib
import logging
import math
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
import zmq

from sgl_pipeline.cluster.remote_workers import RemoteWorkerChannel
from sgl_pipeline.errors import ConfigurationError, ProtocolError
from sgl_pipeline.pp_runner.base.compute_threads import pin_threads
from sgl_pipeline.pp_runner.base.step_inputs import written_pages
from sgl_pipeline.pp_runner.boundary_log import BoundaryLog
from sgl_pipeline.pp_runner.cost_measurement import measure_part_costs
from sgl_pipeline.pp_runner.layer_moves.layer_mover import LayerMover
from sgl_pipeline.pp_runner.leave_signal import LeaveSignal
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape, NeighborGone
from sgl_pipeline.pp_runner.links.open_link import open_activation_link
from sgl_pipeline.pp_runner.links.page_link import StagePageLinks
from sgl_pipeline.pp_runner.pending_reports import PendingReports
from sgl_pipeline.pp_runner.stage_loading import LoadedStage, load_stage
from sgl_pipeline.pp_runner.stage_profile import StageProfile
from sgl_pipeline.pp_runner.stage_runner import StageRunner
from sgl_pipeline.pp_runner.stage_site import StageSite
from sgl_pipeline.pp_runner.worker_hello import WorkerSite, worker_hello
from sgl_pipeline.pp_runner.worker_inbox import RegroupDue, WorkerInbox
from sgl_pipeline.wire.channels import WorkerChannel, WorkerEnd
from sgl_pipeline.wire.logged_pages import log_page_capacity
from sgl_pipeline.wire.move_orders import MOVE_SHARE, AbandonMove, PrepareMove, SwitchPlan
from sgl_pipeline.wire.stage_messages import (
    FinishHandover,
    HandPagesOver,
    MeasureCosts,
    MeasuredCosts,
    PoolSize,
    Regroup,
    Regrouped,
    Shutdown,
    StageAssignment,
    StageLoaded,
    StageReady,
    StartProfile,
    StillLoading,
    StopProfile,
    TakePagesOver,
    ToWorker,
    WorkerFailed,
    WorkerLeaves,
)
from sgl_pipeline.wire.stage_orders import OrderReader, SealedOrder
from sgl_pipeline.wire.step_order import MirrorSnapshot, StepOrder

Message = TypeVar("Message", bound=ToWorker)

# A GPU that has a step to run and one to follow never waits for the host, and what the host would
# launch beyond that waits in FlashInfer's plan for the first of them.
MAX_PENDING_REPORTS = 2
# ZeroMQ's own timeouts are whole milliseconds, which is as long as a step of decodes.
PENDING_POLL_S = 50e-6
MOVE_POLL_S = 0.5e-3
# So often a worker without orders looks whether it was asked to go.
LEAVE_POLL_MS = 100
# Of its loading a worker says no more often that it gets on.
PROGRESS_INTERVAL_S = 0.5


class StageWorker:
    """The worker's side of the conversation in `wire/stage_messages.py`.

    Args:
        leave: how it is asked to go; None: it never is.
    """

    def __init__(
        self,
        channel: WorkerEnd,
        worker: int,
        site: WorkerSite,
        leave: LeaveSignal | None = None,
    ) -> None:
        self._leave = leave
        self._channel = channel
        self._inbox = WorkerInbox(channel)
        self._worker = worker
        self._site = site
        self._page_links: StagePageLinks | None = None
        self._rows: ActivationShape | None = None
        self._progress_s = -math.inf
        self._num_layers_read = 0

    def run(self) -> None:
        """Returns after a `Shutdown`; raises what the process should die of."""
        self._channel.send(worker_hello(self._worker, self._site))
        assignment: StageAssignment | None = self._be_assigned()
        stage: LoadedStage | None = None
        while assignment is not None:
            stage = self._load(assignment, stage)
            message = self._receive()
            # In the place of the page count: others are lost, and the worker gets another stage.
            assignment = (
                message
                if isinstance(message, StageAssignment)
                else self._serve_stage(assignment, stage, self._checked(message, PoolSize))
            )

    def _serve_stage(
        self, assignment: StageAssignment, stage: LoadedStage, pool: PoolSize
    ) -> StageAssignment | None:
        """Runs the stage of `assignment`; returns as `serve`."""
        runner = self._become_ready(assignment, stage, pool.num_pages)
        mover = self._open_mover(assignment, runner)
        if self._leave is not None:
            self._leave.listen()
        profile = StageProfile(assignment.stage, assignment.args.device == "cuda")
        try:
            return self.serve(runner, mover, profile)
        finally:
            mover.close()
            runner.close()

    def serve(
        self, runner: StageRunner, mover: LayerMover[torch.Tensor], profile: StageProfile
    ) -> StageAssignment | None:
        """Obeys orders until a `Shutdown`, or until the worker is given another stage, which it
        returns. All but the next step wait for reports that are pending.

        Raises ProtocolError for a message that a ready stage does not expect, and whatever a step
        fails with.
        """
        orders = OrderReader()
        pending = PendingReports(self._channel.send)
        while not isinstance(message := self._next_message(pending, mover), Shutdown):
            if isinstance(message, StageAssignment):
                profile.stop()
                return message
            order = orders.open(message) if isinstance(message, SealedOrder) else None
            if isinstance(order, StepOrder):
                # What it is dropped for is the next message.
                with contextlib.suppress(RegroupDue):
                    self._run_step(order, runner, mover, profile, pending)
                continue
            pending.send_all_but(0)
            if isinstance(message, Regroup):
                self._regroup(message, runner, mover)
            elif isinstance(message, HandPagesOver | TakePagesOver | FinishHandover):
                mover.obey(message)
            elif isinstance(order, MirrorSnapshot):
                runner.restore(order)
            elif isinstance(order, PrepareMove):
                mover.prepare(order)
            elif isinstance(order, SwitchPlan):
                mover.switch(order)
            elif isinstance(order, AbandonMove):
                mover.abandon(order)
            elif isinstance(message, StartProfile):
                self._channel.send(profile.start(message))
            elif isinstance(message, StopProfile):
                self._channel.send(profile.stop())
            else:
                raise ProtocolError(f"a ready stage received {type(message).__name__}")
        pending.send_all_but(0)
        return None

    def _next_message(
        self, pending: PendingReports, mover: LayerMover[torch.Tensor]
    ) -> ToWorker | None:
        """Waits for it. While reports are pending, it looks for both in turns: either waits no
        longer than `PENDING_POLL_S` and the kernel's timer slack, 0.1 ms together, and a report
        besides for a step to be prepared or launched, if that is under way. While layers move, the
        stage works at that meanwhile."""
        self._leave_if_asked()
        while pending or mover.is_open:
            pending.send_ready()
            self._leave_if_asked()
            if (message := self._inbox.next(timeout_ms=0)) is not None:
                return message
            if not mover.work():
                time.sleep(PENDING_POLL_S if pending else MOVE_POLL_S)
        if self._leave is None:
            return self._inbox.next()
        while (message := self._inbox.next(LEAVE_POLL_MS)) is None:
            self._leave_if_asked()
        return message

    def _leave_if_asked(self) -> None:
        if self._leave is not None and self._leave.take():
            self._channel.send(WorkerLeaves(self._worker))

    def _run_step(
        self,
        plan: StepOrder,
        runner: StageRunner,
        mover: LayerMover[torch.Tensor],
        profile: StageProfile,
        pending: PendingReports,
    ) -> None:
        pending.send_all_but(MAX_PENDING_REPORTS - 1)
        try:
            step = runner.prepare(plan, self._inbox.attend_for)
            pending.send_ready()
            self._await_rows(runner, mover, pending)
            started_s = time.monotonic()
            pending.add(runner.launch(step))
        except NeighborGone:
            self._inbox.wait_for_the_end()
        if mover.is_open:
            mover.wrote(written_pages([*step.replayed, *step.chunks], runner.shape.page_size))
            mover.work_for(MOVE_SHARE * (time.monotonic() - started_s))
        if profile.ends_with_this_step:
            pending.send_all_but(0)
        if (reply := profile.step_done()) is not None:
            self._channel.send(reply)

    def _await_rows(
        self, runner: StageRunner, mover: LayerMover[torch.Tensor], pending: PendingReports
    ) -> None:
        """Returns when the step that was prepared can be launched. Upstream may be far from done
        with it: no report and no layer waits for that, and no word that it will never come."""
        while not runner.can_launch():
            self._inbox.attend()
            if not (pending or mover.is_open):
                self._inbox.wait_beside(runner.rows_descriptor)
                continue
            if not mover.work():
                time.sleep(PENDING_POLL_S)
            pending.send_ready()

    def _regroup(
        self, order: Regroup, runner: StageRunner, mover: LayerMover[torch.Tensor]
    ) -> None:
        """Joins the stages that are left and those that replace the others."""
        assert self._rows is not None
        mover.regroup(order.plan)
        if self._page_links is not None:
            self._page_links.places = order.page_links
        link = open_activation_link(self._rows, order.links, runner.stage, self._site.run_directory)
        runner.regroup(link)
        self._channel.send(Regrouped(runner.stage, order.incarnation))

    def _be_assigned(self) -> StageAssignment:
        message = self._receive()
        while isinstance(message, MeasureCosts):
            costs = measure_part_costs(message.assignment, message.steps)
            self._channel.send(MeasuredCosts(self._worker, costs))
            message = self._receive()
        return self._checked(message, StageAssignment)

    def _load(self, assignment: StageAssignment, before: LoadedStage | None) -> LoadedStage:
        """Loads the stage of `assignment`, and says so."""
        started = time.perf_counter()
        pin_threads(assignment.cpu_threads, assignment.cpu_cores)
        self._num_layers_read = 0
        loaded = load_stage(assignment, before, self._get_on, self._count_layer)
        self._channel.send(
            StageLoaded(
                stage=assignment.stage,
                num_pages=loaded.capacity.num_pages,
                weight_bytes=loaded.weight_bytes,
                page_bytes=loaded.capacity.page_bytes,
                load_seconds=time.perf_counter() - started,
            )
        )
        return loaded

    def _become_ready(
        self, assignment: StageAssignment, loaded: LoadedStage, num_pages: int
    ) -> StageRunner:
        self._rows = loaded.rows
        stage, page_size = assignment.stage, loaded.shape.page_size
        link = open_activation_link(self._rows, assignment.links, stage, self._site.run_directory)
        log_pages = log_page_capacity(
            assignment.log_mib, num_pages, page_size, self._rows.row_bytes
        )
        log = None
        if assignment.log_mib and not loaded.model.is_last:
            log = BoundaryLog(log_pages, num_pages, page_size, self._rows)
        runner = StageRunner(assignment, loaded.model, loaded.shape, num_pages, link, log=log)
        for layer in loaded.spare:
            runner.held_layers.keep_spare(layer)
        started_s = time.perf_counter()
        runner.rehearse(self._get_on)
        rehearsal_s = time.perf_counter() - started_s
        attention = runner.attention_backend
        choices = (attention, loaded.kernels, runner.graphs)
        notices = tuple(filter(None, (*(choice.notice for choice in choices), loaded.notice)))
        self._channel.send(
            StageReady(stage, attention.name, loaded.kernels.name, notices, log_pages, rehearsal_s)
        )
        return runner

    def _get_on(self) -> None:
        """Another tensor is about to be read, or another step rehearsed: lets the scheduler know
        now and then."""
        if time.monotonic() - self._progress_s >= PROGRESS_INTERVAL_S:
            self._progress_s = time.monotonic()
            self._channel.send(StillLoading(self._worker, self._num_layers_read))

    def _count_layer(self) -> None:
        self._num_layers_read += 1

    def _open_mover(
        self, assignment: StageAssignment, runner: StageRunner
    ) -> LayerMover[torch.Tensor]:
        held = runner.held_layers.held
        resident = {*assignment.spare_layers, *held} if assignment.spare_layers else ()
        site = StageSite(
            runner, resident, assignment.max_layers or len(held), self._inbox.attend_for
        )
        self._page_links = links = StagePageLinks(
            assignment.page_links, assignment.stage, site.row_bytes, self._site.run_directory
        )
        return LayerMover(
            assignment.stage, assignment.plan, site, links, self._channel.send, time.monotonic
        )

    def _receive(self) -> ToWorker | None:
        message = self._inbox.next()
        if isinstance(message, Shutdown):
            raise SystemExit(0)
        return message

    def _checked(self, message: ToWorker | None, kind: type[Message]) -> Message:
        if not isinstance(message, kind):
            raise ProtocolError(
                f"worker {self._worker} expected {kind.__name__}, got {type(message).__name__}"
            )
        return message


def run_worker(address: str, worker: int, site: WorkerSite) -> int:
    """Serves the scheduler at `address` until told to stop, or tells it why that cannot be.

    Returns the exit code of the process: 0 after a Shutdown, else 1.
    """
    logging.basicConfig(format=f"[worker {worker}] %(message)s", level=logging.INFO)
    with contextlib.closing(_open_channel(address, worker, site)) as channel:
        return exit_code_of(StageWorker(channel, worker, site, LeaveSignal()).run, channel, worker)


def _open_channel(
    address: str, worker: int, site: WorkerSite
) -> WorkerChannel | RemoteWorkerChannel:
    if not address.startswith("ipc://"):
        return RemoteWorkerChannel(address, site.run_directory)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    return WorkerChannel(context, address, worker)


def exit_code_of(work: Callable[[], None], channel: WorkerEnd, worker: int) -> int:
    """0 when `work` returns; 1 when it fails, which the scheduler hears of."""
    try:
        work()
    except Exception as error:
        is_configuration = isinstance(error, ConfigurationError)
        if not is_configuration:
            traceback.print_exc()
        text = str(error) if is_configuration else f"{type(error).__name__}: {error}"
        channel.send(WorkerFailed(worker, text, is_configuration))
        return 1
    return 0
