"""The stage worker: connects, loads what it is assigned, runs step plans until told to stop.

Run by `stage_process.py`. It connects to the scheduler by address and learns its position from a
`StageAssignment`. It is the conversation only: a step itself is run by `stage_runner.py`.
"""

import contextlib
import logging
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
import zmq

from sgl_pipeline.channels import WorkerChannel
from sgl_pipeline.errors import ConfigurationError, ProtocolError
from sgl_pipeline.layer_moves import MOVE_SHARE, AbandonMove, PrepareMove, SwitchPlan
from sgl_pipeline.messages import (
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
    StopProfile,
    ToWorker,
    WorkerFailed,
)
from sgl_pipeline.pp_runner.cost_measurement import measure_part_costs
from sgl_pipeline.pp_runner.device import open_device, pin_threads
from sgl_pipeline.pp_runner.kernel_choice import choose_layer_kernels, make_layer_kernels
from sgl_pipeline.pp_runner.kv_capacity import kv_page_capacity
from sgl_pipeline.pp_runner.layer_moves.layer_mover import LayerMover
from sgl_pipeline.pp_runner.layer_moves.stage_site import StageSite
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape, NeighborGone
from sgl_pipeline.pp_runner.links.open_link import open_activation_link
from sgl_pipeline.pp_runner.links.page_link import HostPageLinks
from sgl_pipeline.pp_runner.model.model_spec import read_model_spec
from sgl_pipeline.pp_runner.model.stage_model import StageModel
from sgl_pipeline.pp_runner.pending_reports import PendingReports
from sgl_pipeline.pp_runner.stage_profile import StageProfile
from sgl_pipeline.pp_runner.stage_runner import StageRunner
from sgl_pipeline.pp_runner.step_inputs import written_pages
from sgl_pipeline.pp_runner.worker_hello import worker_hello
from sgl_pipeline.pp_runner.worker_inbox import RegroupDue, WorkerInbox
from sgl_pipeline.stage_orders import OrderReader, SealedOrder
from sgl_pipeline.step_plan import MirrorSnapshot, StepPlan

Message = TypeVar("Message", bound=ToWorker)

# A GPU that has a step to run and one to follow never waits for the host, and what the host would
# launch beyond that waits in FlashInfer's plan for the first of them.
MAX_PENDING_REPORTS = 2
# ZeroMQ's own timeouts are whole milliseconds, which is as long as a step of decodes.
PENDING_POLL_S = 50e-6
MOVE_POLL_S = 0.5e-3


class StageWorker:
    """The worker's side of the conversation in `messages.py`."""

    def __init__(self, channel: WorkerChannel, worker: int) -> None:
        self._channel = channel
        self._inbox = WorkerInbox(channel)
        self._worker = worker
        self._rows: ActivationShape | None = None

    def run(self) -> None:
        """Returns after a `Shutdown`; raises what the process should die of."""
        self._channel.send(worker_hello(self._worker))
        assignment = self._be_assigned()
        runner = self._become_ready(assignment)
        mover = self._open_mover(assignment, runner)
        profile = StageProfile(assignment.stage, assignment.device == "cuda")
        try:
            self.serve(runner, mover, profile)
        finally:
            mover.close()
            runner.close()

    def serve(
        self, runner: StageRunner, mover: LayerMover[torch.Tensor], profile: StageProfile
    ) -> None:
        """Obeys orders until a `Shutdown`. All but the next step wait for reports that are pending.

        Raises ProtocolError for a message that a ready stage does not expect, and whatever a step
        fails with.
        """
        orders = OrderReader()
        pending = PendingReports(self._channel.send)
        while not isinstance(message := self._next_message(pending, mover), Shutdown):
            order = orders.open(message) if isinstance(message, SealedOrder) else None
            if isinstance(order, StepPlan):
                # What it is dropped for is the next message.
                with contextlib.suppress(RegroupDue):
                    self._run_step(order, runner, mover, profile, pending)
                continue
            pending.send_all_but(0)
            if isinstance(message, Regroup):
                self._regroup(message, runner, mover)
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

    def _next_message(
        self, pending: PendingReports, mover: LayerMover[torch.Tensor]
    ) -> ToWorker | None:
        """Waits for it. While reports are pending, it looks for both in turns: either waits no
        longer than `PENDING_POLL_S` and the kernel's timer slack, 0.1 ms together, and a report
        besides for a step to be prepared or launched, if that is under way. While layers move, the
        stage works at that meanwhile."""
        while pending or mover.is_open:
            pending.send_ready()
            if (message := self._inbox.next(timeout_ms=0)) is not None:
                return message
            if not mover.work():
                time.sleep(PENDING_POLL_S if pending else MOVE_POLL_S)
        return self._inbox.next()

    def _run_step(
        self,
        plan: StepPlan,
        runner: StageRunner,
        mover: LayerMover[torch.Tensor],
        profile: StageProfile,
        pending: PendingReports,
    ) -> None:
        pending.send_all_but(MAX_PENDING_REPORTS - 1)
        step = runner.prepare(plan)
        pending.send_ready()
        self._await_rows(runner, mover, pending)
        started_s = time.monotonic()
        try:
            pending.add(runner.launch(step))
        except NeighborGone:
            self._inbox.wait_for_the_end()
        if mover.is_open:
            mover.wrote(written_pages(step.chunks, runner.shape.page_size))
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
        runner.regroup(open_activation_link(self._rows, order.links, runner.stage))
        self._channel.send(Regrouped(runner.stage, order.incarnation))

    def _be_assigned(self) -> StageAssignment:
        message = self._receive()
        while isinstance(message, MeasureCosts):
            costs = measure_part_costs(message.assignment, message.steps)
            self._channel.send(MeasuredCosts(self._worker, costs))
            message = self._receive()
        return self._checked(message, StageAssignment)

    def _become_ready(self, assignment: StageAssignment) -> StageRunner:
        started = time.perf_counter()
        pin_threads(assignment.cpu_threads, assignment.cpu_cores)
        device = open_device(assignment.device, assignment.gpu)
        dtype = getattr(torch, assignment.dtype)
        spec = read_model_spec(assignment.model_path)
        stage, plan = assignment.stage, assignment.plan
        kernels = choose_layer_kernels(assignment.layer_kernels, dtype, device)
        model = StageModel.load(
            spec,
            assignment.model_path,
            layers=plan.layers_of(stage),
            is_first=stage == 0,
            is_last=stage == plan.num_stages - 1,
            dtype=dtype,
            device=device,
            kernels=make_layer_kernels(kernels),
            load_format=assignment.load_format,
        )
        spare = [model.read_layer(layer) for layer in assignment.spare_layers]
        spare_bytes = sum(layer.weight_bytes for layer in spare)
        shape = spec.attention_shape(assignment.page_size, dtype, device)
        capacity = kv_page_capacity(
            assignment, spec, device, dtype, layer_bytes=model.largest_layer_bytes
        )
        self._channel.send(
            StageLoaded(
                stage=stage,
                num_pages=capacity.num_pages,
                weight_bytes=model.weight_bytes + spare_bytes,
                page_bytes=capacity.page_bytes,
                load_seconds=time.perf_counter() - started,
            )
        )
        num_pages = self._expect(PoolSize).num_pages
        self._rows = ActivationShape(spec.hidden_size, dtype, device)
        link = open_activation_link(self._rows, assignment.links, stage)
        runner = StageRunner(assignment, model, shape, num_pages, link)
        for layer in spare:
            runner.held_layers.keep_spare(layer)
        attention = runner.attention_backend
        choices = (attention, kernels, runner.graphs)
        notices = tuple(choice.notice for choice in choices if choice.notice)
        self._channel.send(StageReady(stage, attention.name, kernels.name, notices))
        return runner

    def _open_mover(
        self, assignment: StageAssignment, runner: StageRunner
    ) -> LayerMover[torch.Tensor]:
        held = runner.held_layers.held
        resident = {*assignment.spare_layers, *held} if assignment.spare_layers else ()
        site = StageSite(
            runner, resident, assignment.max_layers or len(held), self._inbox.attend_for
        )
        links = HostPageLinks(assignment.page_links, assignment.stage, site.row_bytes)
        return LayerMover(
            assignment.stage, assignment.plan, site, links, self._channel.send, time.monotonic
        )

    def _expect(self, kind: type[Message]) -> Message:
        return self._checked(self._receive(), kind)

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


def run_worker(address: str, worker: int) -> int:
    """Serves the scheduler at `address` until told to stop, or tells it why that cannot be.

    Returns the exit code of the process: 0 after a Shutdown, else 1.
    """
    logging.basicConfig(format=f"[worker {worker}] %(message)s", level=logging.INFO)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with WorkerChannel(context, address, worker) as channel:
        return exit_code_of(StageWorker(channel, worker).run, channel, worker)


def exit_code_of(work: Callable[[], None], channel: WorkerChannel, worker: int) -> int:
    """0 when `work` returns; 1 when it fails, of which the scheduler is told."""
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
