"""The real scheduler and the real stages in one process, without sockets.

The links are queues, everything else is what the server runs: a `PipelineCore` and a `StageRunner`
for each stage. Steps are computed when they are scheduled and their results
booked when the pipeline is full, as if each step took the whole trip.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.messages import StageAssignment, StageReport
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pp_runner.kernel_choice import choose_layer_kernels, make_layer_kernels
from sgl_pipeline.pp_runner.model.model_spec import read_model_spec
from sgl_pipeline.pp_runner.model.stage_model import StageModel
from sgl_pipeline.pp_runner.output.output_tail import Tail
from sgl_pipeline.pp_runner.stage_runner import StageRunner
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling import StepScheduler, TokenEvent
from sgl_pipeline.stage_orders import OrderReader
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.step_plan import StepPlan
from sgl_pipeline.throttle import make_policy


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

    def has_rows(self) -> bool:
        return bool(self._upstream)

    def close(self) -> None:
        assert not self._upstream, "activations were left behind"


class LocalPipeline:
    """A whole server's decisions and arithmetic; `run` serves requests to their end."""

    def __init__(
        self,
        model_path: Path,
        layer_counts: Sequence[int],
        *,
        num_pages: int = 256,
        scheduling: SchedulingArgs | None = None,
        throttle: ThrottleArgs | None = None,
        dtype: str = "float32",
        attention_backend: str = "torch",
        layer_kernels: str = "torch",
    ) -> None:
        scheduling = scheduling or SchedulingArgs()
        plan = StagePlan(0, tuple(layer_counts))
        queues: list[deque] = [deque() for _ in range(plan.num_stages + 1)]
        self.runners = [
            open_stage(
                model_path,
                plan,
                stage,
                QueueLink(queues[stage], queues[stage + 1]),
                num_pages=num_pages,
                page_size=scheduling.page_size,
                dtype=dtype,
                attention_backend=attention_backend,
                layer_kernels=layer_kernels,
            )
            for stage in range(plan.num_stages)
        ]
        self.scheduler = StepScheduler(
            scheduling,
            make_policy(throttle or ThrottleArgs()),
            num_pages=num_pages,
            num_stages=plan.num_stages,
            context_length=read_model_spec(model_path).context_length,
        )
        self.microbatches: list[Microbatch] = []
        self._plan = plan
        self._core = PipelineCore(self.scheduler, plan)
        self._orders = OrderReader()
        self._in_flight: deque[list[StageReport]] = deque()

    def schedule(self) -> bool:
        """Starts one step; False when the scheduler has none."""
        step = self._core.next_step(0.0)
        if step is None:
            return False
        self.microbatches.append(step.microbatch)
        plan = self._orders.open(step.order)
        assert isinstance(plan, StepPlan)
        self._in_flight.append([runner.run_step(plan).report() for runner in self.runners])
        return True

    def complete(self) -> list[TokenEvent]:
        """Books the oldest step in flight."""
        events: list[TokenEvent] = []
        for report in self._in_flight.popleft():
            step = self._core.take_report(report, 0.0)
            events += step.events if step is not None else []
        self._core.take_records()
        self.scheduler.check_invariants()
        return events

    def split_again(self, layer_counts: Sequence[int]) -> None:
        """Moves layers between two steps, as orders will do it: the new owner holds a layer, takes
        over its pages and runs it from the next step on; the old owner drops it."""
        new = StagePlan(self._plan.epoch + 1, tuple(layer_counts))
        stages = [runner.held_layers for runner in self.runners]
        owner = {layer: stage for stage in stages for layer in stage.held}
        moves = [
            (layer, owner[layer], target)
            for number, target in enumerate(stages)
            for layer in new.layers_of(number)
            if owner[layer] is not target
        ]
        for layer, source, target in moves:
            target.hold(layer)
            for mine, theirs in zip(
                target.kv_pool.pages(layer), source.kv_pool.pages(layer), strict=True
            ):
                mine.copy_(theirs)
        for runner in self.runners:
            runner.know_plan(new)
        for layer, source, _ in moves:
            source.drop(layer)
        self._plan = new

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """The output ids of `requests`, all of which arrive at once."""
        for request in requests:
            self.scheduler.add(request)
        while True:
            while self.schedule():
                pass
            if not self._in_flight:
                break
            self.complete()
        assert self.scheduler.is_idle
        return [request.output_ids for request in requests]


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
    tail: Tail | None = None,
) -> StageRunner:
    """One stage of it, by itself."""
    spec = read_model_spec(model_path)
    device, torch_dtype = torch.device("cpu"), getattr(torch, dtype)
    assignment = StageAssignment(
        stage=stage,
        plan=plan,
        model_path=str(model_path),
        load_format="safetensors",
        dtype=dtype,
        device="cpu",
        attention_backend=attention_backend,
        layer_kernels=layer_kernels,
        page_size=page_size,
        max_total_tokens=None,
        memory_fraction=0.5,
        links=(),
        cpu_threads=1,
        cpu_cores=(),
    )
    model = StageModel.load(
        spec,
        model_path,
        layers=plan.layers_of(stage),
        is_first=stage == 0,
        is_last=stage == plan.num_stages - 1,
        dtype=torch_dtype,
        device=device,
        kernels=make_layer_kernels(choose_layer_kernels(layer_kernels, torch_dtype, device)),
    )
    shape = spec.attention_shape(page_size, torch_dtype, device)
    return StageRunner(assignment, model, shape, num_pages, link, tail)
