"""The load of `bench_decisions`: a queue and a full pipeline that are kept at their size.

Drives a `PipelineCore` without stages, with a token for every sample: what is timed is deciding,
nothing else. Prompts are drawn from 256 ids, whose integers Python keeps once.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmark.forecasts.cpu_parts import CPU_COSTS, NUM_LAYERS
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.requests import GREEDY, LogprobRows, Request, StopRules, TokenEvent
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import make_policy
from sgl_pipeline.wire.stage_messages import StageReport

T = TypeVar("T")
OPERATIONS = ("next_microbatch", "on_result", "add")
_NO_TIME = StageTiming(*[0.0] * 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`waiting` requests behind a pipeline that runs `running` of them.

    Half of the prompts begin with one of `num_prefixes` prefixes of `shared_tokens` tokens. The
    pool holds `pool_share` of what `running` requests need at their longest. Several tenants share
    it fairly, by predicted times. With state slots the model has states: a prefix is a hit where a
    snapshot of them is.
    """

    name: str
    waiting: int = 10_000
    prompt_tokens: int = 2000
    shared_tokens: int = 1000
    num_prefixes: int = 16
    running: int = 512
    num_stages: int = 4
    output_tokens: tuple[int, int] = (50, 350)
    pool_share: float = 1.5
    num_priorities: int = 1
    num_tenants: int = 1
    num_state_slots: int = 0
    policy: str = "throttle"
    schedule_policy: str = "fcfs"
    page_size: int = 16


class Timings:
    """Seconds of each call, by operation: elapsed, and of this thread's processor time."""

    def __init__(self) -> None:
        self.elapsed_s: dict[str, list[float]] = {name: [] for name in OPERATIONS}
        self.processor_s: dict[str, list[float]] = {name: [] for name in OPERATIONS}
        self.num_retractions = 0
        self.mean_running = 0.0

    def call(self, operation: str, function: Callable[..., T], *arguments: Any) -> T:
        elapsed, processor = time.perf_counter(), time.thread_time()
        result = function(*arguments)
        self.processor_s[operation].append(time.thread_time() - processor)
        self.elapsed_s[operation].append(time.perf_counter() - elapsed)
        return result

    def drop_last(self, operation: str) -> None:
        self.processor_s[operation].pop()
        self.elapsed_s[operation].pop()

    def forget(self, operation: str) -> None:
        self.elapsed_s[operation].clear()
        self.processor_s[operation].clear()


class TimedScheduler(StepScheduler):
    """Writes down how long its decisions take."""

    timings: Timings

    def next_microbatch(self, now_s: float) -> Microbatch | None:
        microbatch = self.timings.call("next_microbatch", super().next_microbatch, now_s)
        if microbatch is None:
            self.timings.drop_last("next_microbatch")  # the pipeline was full: nothing was decided
        return microbatch

    def on_result(
        self,
        step_id: int,
        token_ids: Sequence[int],
        now_s: float,
        logprobs: Sequence[LogprobRows] = (),
        lost_leases: Set[int] = frozenset(),
    ) -> list[TokenEvent]:
        call, book = self.timings.call, super().on_result
        return call("on_result", book, step_id, token_ids, now_s, logprobs, lost_leases)

    def add(self, request: Request) -> Request | None:
        return self.timings.call("add", super().add, request)


class DecisionLoad:
    """A scheduler under the load of `scenario`; the same calls in every run."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rng = random.Random(scenario.name)
        self._prefixes = [
            self._token_ids(scenario.shared_tokens) for _ in range(scenario.num_prefixes)
        ]
        self._num_made = 0
        longest_tokens = scenario.prompt_tokens + scenario.output_tokens[1]
        num_pages = int(
            scenario.pool_share * scenario.running * longest_tokens / scenario.page_size
        )
        self._scheduler = TimedScheduler(
            SchedulingArgs(
                page_size=scenario.page_size,
                schedule_policy=scenario.schedule_policy,
                max_running_requests=scenario.running,
                preemption_threshold=0 if scenario.num_priorities > 1 else None,
                fair_shares_by="user" if scenario.num_tenants > 1 else None,
                num_state_slots=scenario.num_state_slots,
            ),
            make_policy(ThrottleArgs(policy=scenario.policy)),
            num_pages=num_pages,
            num_stages=scenario.num_stages,
            context_length=longest_tokens,
        )
        self._scheduler.timings = self._timings = Timings()
        # One stage reports each step: what others would report costs no decision. What it takes is
        # known, so that every policy decides as in a server that has run for a while.
        plan = StagePlan(0, (NUM_LAYERS,))
        forecast = StepForecast(plan, StepPredictor(CPU_COSTS), learns=False)
        self._core = PipelineCore(self._scheduler, plan, step_forecast=forecast)
        self._in_flight: deque[OpenStep] = deque()

    def measure(self, num_steps: int) -> Timings:
        """Fills queue and pipeline, then times `num_steps` steps."""
        timings = self._timings
        self._refill()
        # A generation of requests must have come and gone: only then is the cache as full as ever.
        warm_steps = self._scenario.num_stages * self._scenario.output_tokens[1]
        for _ in range(warm_steps):
            self._step()
        retractions = self._scheduler.num_retractions
        for operation in OPERATIONS:
            timings.forget(operation)
        running = 0
        for _ in range(num_steps):
            self._step()
            running += self._scheduler.num_running
        timings.num_retractions = self._scheduler.num_retractions - retractions
        timings.mean_running = running / num_steps
        return timings

    def _step(self) -> None:
        """Fills the pipeline, completes one step, and replaces the requests that ended."""
        while (step := self._core.next_step(0.0)) is not None:
            self._in_flight.append(step)
        done = self._in_flight.popleft().microbatch
        report = StageReport(
            stage=0,
            step_id=done.step_id,
            epoch=0,
            timing=_NO_TIME,
            token_ids=(1,) * done.num_samples,
        )
        self._core.take_report(report, 0.0)
        self._core.take_events()
        self._refill()

    def _refill(self) -> None:
        while self._scheduler.num_waiting < self._scenario.waiting:
            self._scheduler.add(self._request())

    def _request(self) -> Request:
        scenario, number = self._scenario, self._num_made
        self._num_made += 1
        prompt = self._prefixes[self._rng.randrange(len(self._prefixes))] if number % 2 else []
        return Request(
            request_id=str(number),
            prompt_ids=prompt + self._token_ids(scenario.prompt_tokens - len(prompt)),
            sampling=GREEDY,
            stops=StopRules(max_new_tokens=self._rng.randint(*scenario.output_tokens)),
            priority=self._rng.randrange(scenario.num_priorities),
            tenant=str(number % scenario.num_tenants),
        )

    def _token_ids(self, count: int) -> list[int]:
        return list(self._rng.randbytes(count))
