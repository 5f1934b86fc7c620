"""The stage worker: connects, loads what it is assigned, runs step plans until told to stop.

Run by `stage_process.py`. It connects to the scheduler by address and learns its position from a
`StageAssignment`. It is the conversation only: a step itself is run by `stage_runner.py`.
"""

import logging
import time
import traceback
from typing import TypeVar, assert_never

import torch
import zmq

from sgl_pipeline.channels import WorkerChannel
from sgl_pipeline.errors import ConfigurationError, ProtocolError
from sgl_pipeline.messages import (
    MeasureCosts,
    MeasuredCosts,
    PoolSize,
    Shutdown,
    StageAssignment,
    StageLoaded,
    StageReady,
    StartProfile,
    StopProfile,
    ToWorker,
    WorkerFailed,
)
from sgl_pipeline.pp_runner.cost_measurement import measure_stage_costs
from sgl_pipeline.pp_runner.device import open_device, pin_threads
from sgl_pipeline.pp_runner.kernel_choice import choose_layer_kernels, make_layer_kernels
from sgl_pipeline.pp_runner.kv_capacity import kv_page_capacity
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.links.open_link import open_activation_link
from sgl_pipeline.pp_runner.model_spec import read_model_spec
from sgl_pipeline.pp_runner.stage_model import StageModel
from sgl_pipeline.pp_runner.stage_profile import StageProfile
from sgl_pipeline.pp_runner.stage_runner import StageRunner
from sgl_pipeline.pp_runner.worker_hello import worker_hello
from sgl_pipeline.stage_orders import OrderReader, SealedOrder, StageOrder
from sgl_pipeline.step_plan import MirrorSnapshot, StepPlan

Message = TypeVar("Message", bound=ToWorker)


class StageWorker:
    """The worker's side of the conversation in `messages.py`."""

    def __init__(self, channel: WorkerChannel, worker: int) -> None:
        self._channel = channel
        self._worker = worker

    def run(self) -> None:
        """Returns after a `Shutdown`; raises what the process should die of."""
        self._channel.send(worker_hello(self._worker))
        assignment = self._be_assigned()
        runner = self._become_ready(assignment)
        profile = StageProfile(assignment.stage, assignment.device == "cuda")
        orders = OrderReader()
        try:
            while not isinstance(message := self._channel.receive(), Shutdown):
                if isinstance(message, SealedOrder):
                    self._obey(orders.open(message), runner, profile)
                elif isinstance(message, StartProfile):
                    self._channel.send(profile.start(message))
                elif isinstance(message, StopProfile):
                    self._channel.send(profile.stop())
                else:
                    raise ProtocolError(f"a ready stage received {type(message).__name__}")
        finally:
            runner.close()

    def _obey(self, order: StageOrder, runner: StageRunner, profile: StageProfile) -> None:
        if isinstance(order, StepPlan):
            self._channel.send(runner.run_step(order))
            if (reply := profile.step_done()) is not None:
                self._channel.send(reply)
        elif isinstance(order, MirrorSnapshot):
            runner.restore(order)
        else:
            assert_never(order)

    def _be_assigned(self) -> StageAssignment:
        message = self._receive()
        if isinstance(message, MeasureCosts):
            costs = measure_stage_costs(message.assignment)
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
        shape = spec.attention_shape(assignment.page_size, dtype, device)
        capacity = kv_page_capacity(assignment, spec, device, dtype)
        self._channel.send(
            StageLoaded(
                stage=stage,
                num_pages=capacity.num_pages,
                weight_bytes=model.weight_bytes,
                page_bytes=capacity.page_bytes,
                load_seconds=time.perf_counter() - started,
            )
        )
        num_pages = self._expect(PoolSize).num_pages
        link = open_activation_link(
            ActivationShape(spec.hidden_size, dtype, device), assignment.links, stage
        )
        runner = StageRunner(assignment, model, shape, num_pages, link)
        attention = runner.attention_backend
        notices = tuple(choice.notice for choice in (attention, kernels) if choice.notice)
        self._channel.send(StageReady(stage, attention.name, kernels.name, notices))
        return runner

    def _expect(self, kind: type[Message]) -> Message:
        return self._checked(self._receive(), kind)

    def _receive(self) -> ToWorker | None:
        message = self._channel.receive()
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
        try:
            StageWorker(channel, worker).run()
        except Exception as error:
            is_configuration = isinstance(error, ConfigurationError)
            if not is_configuration:
                traceback.print_exc()
            text = str(error) if is_configuration else f"{type(error).__name__}: {error}"
            channel.send(WorkerFailed(worker, text, is_configuration))
            return 1
    return 0
