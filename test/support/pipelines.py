"""A virtual pipeline around a `PipelineCore`: mirrors and a model without arithmetic.

The model (`test/fault_schedules/fake_model.py`) exists twice, as the earliest and the latest
moment at which a stage may run a step, and both must draw the same.
"""

from collections import deque
from collections.abc import Sequence

from fault_schedules.fake_model import FakeStage, NoRepeats, Oracle

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.requests import (
    GREEDY,
    LogprobSpec,
    Request,
    StopRules,
)
from sgl_pipeline.scheduling import StepScheduler, TokenEvent
from sgl_pipeline.scheduling.recovery_log import RecoveryLog
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import make_policy
from sgl_pipeline.wire.stage_messages import StageReport
from sgl_pipeline.wire.stage_orders import OrderReader
from sgl_pipeline.wire.step_order import MirroredChunk, MirrorSnapshot, RequestMirror, StepOrder

NO_TIME = StageTiming(*[0.0] * 7)
FOUR_TOKEN_PAGES = SchedulingArgs(page_size=4)
TOKEN_THROTTLE = ThrottleArgs(policy="throttle")


def make_request(
    request_id: str,
    prompt_ids: Sequence[int],
    max_new_tokens: int = 4,
    *,
    stop_token_ids: frozenset[int] = frozenset(),
    priority: int = 0,
    namespace: str = "",
    tenant: str = "",
    logprob_start: int | None = None,
    constrained: bool = False,
) -> Request:
    """`logprob_start` asks for log-probabilities from that prompt position on, `constrained` for a
    `NoRepeats`."""
    return Request(
        request_id=request_id,
        prompt_ids=list(prompt_ids),
        sampling=GREEDY,
        stops=StopRules(max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids),
        priority=priority,
        cache_namespace=namespace,
        tenant=tenant,
        logprobs=None if logprob_start is None else LogprobSpec(logprob_start),
        constraint=NoRepeats() if constrained else None,
    )


def output_when_alone(request: Request) -> list[int]:
    """What `request` must yield, from its prompt alone."""
    return Oracle(request).output


def logprobs_when_alone(request: Request) -> list[int]:
    """What must stand in the rows of `request`, which ended by itself: one of each position."""
    return Oracle(request).rows


def new_scheduler(
    args: SchedulingArgs = FOUR_TOKEN_PAGES,
    throttle: ThrottleArgs = TOKEN_THROTTLE,
    *,
    num_pages: int,
    num_stages: int,
    context_length: int = 1000,
    log: RecoveryLog | None = None,
) -> StepScheduler:
    """One without requests, whose policy is that of `throttle`."""
    return StepScheduler(
        args,
        make_policy(throttle),
        num_pages=num_pages,
        num_stages=num_stages,
        context_length=context_length,
        log=log,
    )


class FakePipeline:
    """Sends a scheduler's steps through the wire format to the fake stages, first in first out."""

    def __init__(
        self, scheduler: StepScheduler, page_size: int, predictor: StepPredictor | None = None
    ) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.microbatches: list[Microbatch] = []
        plan = StagePlan(0, (1,))
        forecast = StepForecast(plan, predictor, learns=False)
        self.core = PipelineCore(scheduler, plan, step_forecast=forecast)
        self._orders = OrderReader()
        self._mirror = RequestMirror()
        self._page_size = page_size
        self._num_losses = 0
        self._early, self._late = self._new_stage(), self._new_stage()
        self._in_flight: deque[tuple[int, list[MirroredChunk], list[int]]] = deque()

    def _new_stage(self) -> FakeStage:
        return FakeStage(self._page_size, (0,), self.scheduler.state_slots.num_slots)

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    def schedule(self) -> Microbatch | None:
        """Starts one step, if the scheduler has one."""
        step = self.core.next_step(self.now_s)
        if step is None:
            return None
        microbatch, plan = step.microbatch, self._orders.open(step.order)
        assert isinstance(plan, StepOrder)
        chunks = self._mirror.apply(plan)
        for chunk, mirrored in zip(microbatch.chunks, chunks, strict=True):
            request = chunk.request
            assert list(mirrored.request.tokens) == request.prompt_ids + request.output_ids
            assert list(mirrored.request.pages) == request.pages
            assert (mirrored.start, mirrored.length) == (chunk.start, chunk.length)
        self._early.run(chunks)
        self._in_flight.append((microbatch.step_id, chunks, self._early.draw(chunks)))
        self.microbatches.append(microbatch)
        return microbatch

    def complete(self) -> list[TokenEvent]:
        """Finishes the oldest step in flight."""
        step_id, chunks, early_tokens = self._in_flight.popleft()
        self._late.run(chunks)
        late_tokens = self._late.draw(chunks)
        assert late_tokens == early_tokens
        report = StageReport(
            stage=0,
            step_id=step_id,
            epoch=0,
            timing=NO_TIME,
            token_ids=tuple(late_tokens),
            logprobs=tuple(self._late.logprobs(chunks)),
        )
        (step,) = self.core.take_report(report, self.now_s)
        self.core.take_events()
        return step.events

    def take_back_steps(self) -> None:
        """Drops all steps in flight; the stages keep what they were told and have computed."""
        self._in_flight.clear()
        self.core.open_steps.take_back()
        self.scheduler.forget_in_flight()

    def lose_stages(self, num_state_slots: int | None = None) -> None:
        """The stages are replaced by others, which know nothing and hold no pages; of a model with
        states they may have another number of slots."""
        self._in_flight.clear()
        self.core.halt([0], "killed", self.now_s)
        self._num_losses += 1
        num_pages = None if num_state_slots is None else self.scheduler.load().total_pages
        order = self.core.start_over(self._num_losses, num_pages, 0, num_state_slots or 0)
        self._early, self._late = self._new_stage(), self._new_stage()
        self._mirror = RequestMirror()
        snapshot = self._orders.open(order)
        assert isinstance(snapshot, MirrorSnapshot)
        self._mirror.restore(snapshot)

    def fill(self) -> None:
        """Starts steps until the pipeline is full or there is nothing to do."""
        while self.schedule() is not None:
            pass

    def drain(self, max_steps: int = 10_000) -> list[TokenEvent]:
        """Runs until nothing is left; fails when that takes more than `max_steps` steps."""
        events: list[TokenEvent] = []
        for _ in range(max_steps):
            self.fill()
            if not self._in_flight:
                assert self.scheduler.is_idle, "requests are left, but nothing can run"
                return events
            events += self.complete()
            self.scheduler.check_invariants()
        raise AssertionError(f"not done after {max_steps} steps")


def new_pipeline(
    args: SchedulingArgs = FOUR_TOKEN_PAGES,
    throttle: ThrottleArgs = TOKEN_THROTTLE,
    *,
    num_pages: int,
    num_stages: int,
    context_length: int = 1000,
) -> FakePipeline:
    """Around a `new_scheduler`."""
    scheduler = new_scheduler(
        args, throttle, num_pages=num_pages, num_stages=num_stages, context_length=context_length
    )
    return FakePipeline(scheduler, args.page_size)
