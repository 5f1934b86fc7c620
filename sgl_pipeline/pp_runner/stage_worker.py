"""The stage worker: connects, loads the stage that it is assigned, serves until told to stop.

It connects to the scheduler by address and learns its position from a `StageAssignment`. This file
is the conversation up to readiness; `ready_stage.py` obeys orders, `stage_runner.py` runs steps.
"""

import contextlib
import functools
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
from sgl_pipeline.pp_runner.boundary_log import BoundaryLog
from sgl_pipeline.pp_runner.cost_measurement import measure_part_costs
from sgl_pipeline.pp_runner.layer_moves.layer_mover import LayerMover
from sgl_pipeline.pp_runner.leave_signal import LeaveSignal
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.links.open_link import open_activation_link
from sgl_pipeline.pp_runner.links.page_link import StagePageLinks
from sgl_pipeline.pp_runner.open_transfers import open_transfers
from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.pp_runner.page_store.stage_offers import PeerSite
from sgl_pipeline.pp_runner.ready_stage import ReadyStage
from sgl_pipeline.pp_runner.stage_loading import LoadedStage, load_stage
from sgl_pipeline.pp_runner.stage_profile import StageProfile
from sgl_pipeline.pp_runner.stage_runner import StageRunner
from sgl_pipeline.pp_runner.stage_site import StageSite
from sgl_pipeline.pp_runner.worker_hello import WorkerSite, worker_hello
from sgl_pipeline.pp_runner.worker_inbox import WorkerInbox
from sgl_pipeline.wire.channels import WorkerChannel, WorkerEnd
from sgl_pipeline.wire.logged_pages import log_page_capacity
from sgl_pipeline.wire.stage_messages import (
    MeasureCosts,
    MeasuredCosts,
    PoolSize,
    Regroup,
    Regrouped,
    Shutdown,
    StageAssignment,
    StageLoaded,
    StageReady,
    StillLoading,
    ToWorker,
    WorkerFailed,
)
from sgl_pipeline.wire.store_orders import offer_door

Message = TypeVar("Message", bound=ToWorker)

# A worker that loads reports its progress at most this often.
PROGRESS_INTERVAL_S = 0.5


class StageWorker:
    """The worker's side of the conversation in `wire/stage_messages.py`.

    Args:
        leave: the way in which it is asked to go; None: it never is.
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
        """Returns after a `Shutdown`; raises an error that should end the process."""
        self._channel.send(worker_hello(self._worker, self._site))
        assignment: StageAssignment | None = self._be_assigned()
        stage: LoadedStage | None = None
        while assignment is not None:
            stage = self._load(assignment, stage)
            message = self._receive()
            # An assignment in place of the page count: others are lost, the stage is another one.
            assignment = (
                message
                if isinstance(message, StageAssignment)
                else self._serve_stage(assignment, stage, self._checked(message, PoolSize))
            )

    def _serve_stage(
        self, assignment: StageAssignment, stage: LoadedStage, pool: PoolSize
    ) -> StageAssignment | None:
        """Runs the stage of `assignment`; returns as `ReadyStage.serve`."""
        if self._leave is not None:  # before a ready worker can be asked to go
            self._leave.listen()
        runner = self._become_ready(assignment, stage, pool)
        mover = self._open_mover(assignment, runner)
        site = PeerSite(self._site.run_directory, offer_door(self._worker))
        transfers = open_transfers(runner, mover, site)
        profile = StageProfile(assignment.stage, assignment.args.device == "cuda")
        try:
            return self.serve(runner, mover, transfers, profile)
        finally:
            transfers.close()
            mover.close()
            runner.close()

    def serve(
        self,
        runner: StageRunner,
        mover: LayerMover[torch.Tensor],
        transfers: PageTransfers,
        profile: StageProfile,
    ) -> StageAssignment | None:
        """See `ReadyStage.serve`."""
        regroup = functools.partial(self._regroup, runner=runner, mover=mover)
        return ReadyStage(
            self._worker,
            self._channel,
            self._inbox,
            runner,
            mover,
            transfers,
            profile,
            regroup,
            self._leave,
        ).serve()

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
        """Loads the stage of `assignment`, and reports it."""
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
                num_state_slots=loaded.capacity.num_state_slots,
                load_seconds=time.perf_counter() - started,
            )
        )
        return loaded

    def _become_ready(
        self, assignment: StageAssignment, loaded: LoadedStage, pool: PoolSize
    ) -> StageRunner:
        self._rows, num_pages = loaded.rows, pool.num_pages
        stage, page_size = assignment.stage, loaded.shapes[0].page_size
        link = open_activation_link(self._rows, assignment.links, stage, self._site.run_directory)
        log_pages = log_page_capacity(
            assignment.log_mib, num_pages, page_size, self._rows.row_bytes
        )
        log = None
        if assignment.log_mib and not loaded.model.is_last:
            log = BoundaryLog(log_pages, num_pages, page_size, self._rows)
        runner = StageRunner(
            assignment,
            loaded.model,
            loaded.shapes,
            num_pages,
            link,
            log=log,
            run_directory=self._site.run_directory,
            num_state_slots=pool.num_state_slots,
        )
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
        """Another tensor is about to be read, or another step rehearsed: reports progress now and
        then."""
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
    """Serves the scheduler at `address` until told to stop, or reports the failure to it.

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
    """0 when `work` returns; 1 when it fails, which is reported to the scheduler."""
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
