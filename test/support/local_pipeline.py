"""The real scheduler and the real stages in one process.

The activation links are queues, everything else is what the server runs: a `PipelineCore`, and for
each stage a `StageRunner` and a `LayerMover`. Steps are computed when they are scheduled and their
results booked when the pipeline is full, as if each step took the whole trip.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from support.pipelines import new_scheduler

from sgl_pipeline.args import MigrationArgs, SchedulingArgs, StageArgs, ThrottleArgs
from sgl_pipeline.costs.step_costs import StepCosts
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pp_runner.base.step_inputs import written_pages, written_slots
from sgl_pipeline.pp_runner.boundary_log import BoundaryLog
from sgl_pipeline.pp_runner.kernel_choice import choose_layer_kernels, make_layer_kernels
from sgl_pipeline.pp_runner.layer_moves.layer_mover import LayerMover
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.links.page_link import StagePageLinks
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec, read_model_spec
from sgl_pipeline.pp_runner.output.output_tail import Tail
from sgl_pipeline.pp_runner.stage_model_choice import load_stage_model
from sgl_pipeline.pp_runner.stage_runner import StageRunner
from sgl_pipeline.pp_runner.stage_site import StageSite
from sgl_pipeline.records.move_record import MoveRecord
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling import RecoveryLog, TokenEvent
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.move_orders import AbandonMove, PrepareMove, SwitchPlan
from sgl_pipeline.wire.stage_messages import StageAssignment, StageReport
from sgl_pipeline.wire.stage_orders import OrderReader, StageOrder
from sgl_pipeline.wire.step_order import MirrorSnapshot, StepOrder

# For tests to which kernels are nothing: where there is a compiler, a step takes a fourth of the
# time of plain torch in fp32. Without one, a last bit of products may differ with AMX, by rows
# (docs/design/stages.md).
FASTEST: dict[str, Any] = {
    "dtype": "bfloat16",
    "attention_backend": "auto",
    "layer_kernels": "auto",
}


class QueueLink:
    """An ActivationLink between stages of one process."""

    def __init__(self, upstream: deque, downstream: deque) -> None:
        self._upstream = upstream
        self._downstream = downstream

    def send(self, step_id: int, hidden: torch.Tensor) -> None:
        self._downstream.append((step_id, hidden))

    def receive(self, step_id: int, num_rows: int) -> torch.Tensor:
        sent_step_id, hidden = self._upstream.popleft()
        assert (sent_step_id, len(hidden)) == (step_id, num_rows)
        return hidden

    def has_room(self) -> bool:
        return True

    def has_rows(self) -> bool:
        return bool(self._upstream)

    @property
    def descriptor(self) -> int | None:
        return None

    def close(self) -> None:
        assert not self._upstream, "activations were left behind"


class LocalPipeline:
    """A whole server's decisions and arithmetic; `run` serves requests to their end.

    Args:
        costs: what steps are predicted by from the first one on, whatever they take; None: steps
            are predicted once enough have been seen, as on a server without a file of costs.
    """

    def __init__(
        self,
        model_path: Path,
        layer_counts: Sequence[int],
        *,
        num_pages: int = 256,
        scheduling: SchedulingArgs | None = None,
        throttle: ThrottleArgs | None = None,
        costs: StepCosts | None = None,
        dtype: str = "float32",
        attention_backend: str = "torch",
        layer_kernels: str = "torch",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        log_pages: int | None = None,
        spec: ModelSpec | None = None,
    ) -> None:
        scheduling = scheduling or SchedulingArgs()
        plan = StagePlan(0, tuple(layer_counts))
        self._open_stage = partial(
            open_stage,
            model_path,
            num_pages=num_pages,
            page_size=scheduling.page_size,
            dtype=dtype,
            attention_backend=attention_backend,
            layer_kernels=layer_kernels,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            log_pages=log_pages,
            spec=spec,
            num_state_slots=scheduling.num_state_slots,
        )
        links = make_links(plan.num_stages)
        self.runners = [self._open_stage(plan, stage, link) for stage, link in enumerate(links)]
        log = None
        if log_pages is not None:
            log = RecoveryLog(plan.num_stages, scheduling.page_size, log_pages)
        self.scheduler = new_scheduler(
            scheduling,
            throttle or ThrottleArgs(policy="throttle"),
            num_pages=num_pages,
            num_stages=plan.num_stages,
            context_length=(spec or read_model_spec(model_path)).context_length,
            log=log,
        )
        self.microbatches: list[Microbatch] = []
        migration = MigrationControl.of(
            MigrationArgs(mode="manual", spare_layers=plan.num_layers), plan
        )
        forecast = None
        if costs is not None:
            forecast = StepForecast(plan, StepPredictor(costs), learns=False)
        self.core = PipelineCore(self.scheduler, plan, migration, forecast)
        self._orders = OrderReader()
        self._in_flight: deque[list[StageReport]] = deque()
        self._num_losses = 0
        self._directory = TemporaryDirectory()
        self.movers = [
            self._mover(stage, runner, plan) for stage, runner in enumerate(self.runners)
        ]

    def schedule(self) -> bool:
        """Starts one step; False when the scheduler has none. A move under way gets a little done
        before it."""
        self.work_at_moves()
        step = self.core.next_step(0.0)
        if step is None:
            return False
        self.microbatches.append(step.microbatch)
        plan = self._orders.open(step.order)
        assert isinstance(plan, StepOrder)
        reports = []
        for runner, mover in zip(self.runners, self.movers, strict=True):
            prepared = runner.prepare(plan)
            reports.append(runner.launch(prepared).report())
            pages = written_pages(prepared.chunks, runner.page_size)
            mover.wrote(pages, written_slots(prepared.chunks))
        self._in_flight.append(reports)
        return True

    def work_at_moves(self) -> None:
        """Gives out the orders that are due, and lets each stage do one small thing."""
        for sealed in self.core.orders_before_step(0.0):
            self.obey(self._orders.open(sealed))
        for mover in self.movers:
            mover.work()

    def obey(self, order: Any) -> None:
        """All stages obey an order between steps."""
        if isinstance(order, PrepareMove):
            self._read_weights(order.plan)
        for mover in self.movers:
            _obey(mover, order)
        while any(mover.has_rest and not mover.send_rest() for mover in self.movers):
            for mover in self.movers:
                mover.work()

    def _read_weights(self, plan: StagePlan) -> None:
        """With the weights of `plan` at hand, what happens when depends on no thread."""
        for stage, runner in enumerate(self.runners):
            layers = runner.held_layers
            for layer in sorted({*plan.layers_of(stage)} - {*layers.held, *layers.spare}):
                layers.keep_spare(layers.model.read_layer(layer))

    def has_more(self) -> bool:
        """True if requests wait for something other than a step."""
        return False

    def complete(self) -> list[TokenEvent]:
        """Books the oldest step in flight."""
        events: list[TokenEvent] = []
        for report in self._in_flight.popleft():
            for step in self.core.take_report(report, 0.0):
                events += step.events
        self.core.take_events()
        self.scheduler.check_invariants()
        return events

    def finish_move(self, layer_counts: Sequence[int]) -> MoveRecord:
        """Moves to a plan without a step."""
        record = self.core.migration.move_to(layer_counts, 0.0)
        while not record.is_over:
            self.work_at_moves()
        return record

    def _mover(self, stage: int, runner: StageRunner, plan: StagePlan) -> LayerMover[torch.Tensor]:
        layers = range(plan.num_layers)
        site = StageSite(runner, layers, plan.num_layers, attend=_nobody_speaks)
        links = StagePageLinks(
            (f"unix:{self._directory.name}",) * plan.num_stages, stage, site.row_bytes, ""
        )
        report = partial(self.core.migration.take, now_s=0.0)
        return LayerMover(stage, plan, site, links, report, clock=lambda: 0.0)

    def lose(self, *stages: int) -> None:
        """The stages are lost, with what they hold, and replaced by others; the steps in flight
        are taken back, which all stages have run."""
        self._in_flight.clear()
        self.core.halt(stages, "killed", 0.0)
        plan = self.core.plan
        links = make_links(plan.num_stages)
        for stage, link in enumerate(links):
            if stage in stages:
                self.runners[stage] = self._open_stage(plan, stage, link)
                self.movers[stage] = self._mover(stage, self.runners[stage], plan)
            else:
                self.movers[stage].regroup(plan)
                self.runners[stage].regroup(link)
        self._num_losses += 1
        snapshot = self._orders.open(self.core.start_over(self._num_losses))
        assert isinstance(snapshot, MirrorSnapshot)
        for runner in self.runners:
            runner.restore(snapshot)

    def run(
        self, requests: Sequence[Request], after_step: Callable[[int], None] | None = None
    ) -> list[list[int]]:
        """The output ids of `requests`, all of which arrive at once.

        Args:
            after_step: called with the number of each step that was sent since the start.
        """
        for request in requests:
            self.scheduler.add(request)
        while True:
            while self.schedule():
                if after_step is not None:
                    after_step(len(self.microbatches))
            if self._in_flight:
                self.complete()
            elif not self.has_more():
                break
        assert self.scheduler.is_idle
        return [request.output_ids for request in requests]


def make_links(num_stages: int) -> list[QueueLink]:
    """One for each stage."""
    queues: list[deque] = [deque() for _ in range(num_stages + 1)]
    return [QueueLink(queues[stage], queues[stage + 1]) for stage in range(num_stages)]


def _nobody_speaks(timeout_s: float) -> None:
    """No stage is ever gone, so no step waits for pages of one that is."""
    assert timeout_s == 0.0, "a step waits for pages that nobody will send"


def _obey(mover: LayerMover[torch.Tensor], order: StageOrder) -> None:
    if isinstance(order, PrepareMove):
        mover.prepare(order)
    elif isinstance(order, SwitchPlan):
        mover.switch(order)
    else:
        assert isinstance(order, AbandonMove)
        mover.abandon(order)


def open_stage(
    model_path: Path,
    plan: StagePlan,
    stage: int,
    link: QueueLink,
    *,
    num_pages: int = 256,
    page_size: int = 16,
    dtype: str = "float32",
    attention_backend: str = "torch",
    layer_kernels: str = "torch",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    tail: Tail | None = None,
    log_pages: int | None = None,
    spec: ModelSpec | None = None,
    run_directory: str = "",
    num_state_slots: int = 0,
) -> StageRunner:
    """One stage of it, by itself; it keeps the rows that it sends of `log_pages` pages."""
    spec = read_model_spec(model_path, quantization) if spec is None else spec
    device, torch_dtype = torch.device("cpu"), getattr(torch, dtype)
    assignment = StageAssignment(
        stage=stage,
        plan=plan,
        args=StageArgs(
            model_path=str(model_path),
            dtype=dtype,
            attention_backend=attention_backend,
            layer_kernels=layer_kernels,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            num_state_slots=num_state_slots,
        ),
        page_size=page_size,
        links=(),
        cpu_threads=1,
        cpu_cores=(),
    )
    model = load_stage_model(
        spec,
        model_path,
        layers=plan.layers_of(stage),
        is_first=stage == 0,
        is_last=stage == plan.num_stages - 1,
        dtype=torch_dtype,
        device=device,
        kernels=make_layer_kernels(choose_layer_kernels(layer_kernels, torch_dtype, device)),
    )
    shapes = spec.attention_shapes(page_size, torch_dtype, device, kv_cache_dtype)
    log = None
    if log_pages is not None and not model.is_last:
        rows = ActivationShape(spec.hidden_size, torch_dtype, device)
        log = BoundaryLog(log_pages, num_pages, page_size, rows)
    return StageRunner(
        assignment, model, shapes, num_pages, link, tail, log, run_directory, num_state_slots
    )
