"""Forecasts held to an oracle: a run in virtual time, in which the requests did run at some time.

No forecaster knows who ends when. So queues that wait for compute alone are held to a few percent,
and those that wait for answers to end to their order of magnitude.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median

import pytest
from support.pipelines import FakePipeline, make_request, new_pipeline, new_scheduler

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.request_forecast import RequestForecast
from sgl_pipeline.requests import FinishReason, Request, StopRules
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.forecasts import fitted_costs
from sgl_pipeline.simulator.virtual_drafts import DraftAcceptance
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import PipelineLoad, TokenBudget, make_policy

pytestmark = pytest.mark.slow

CLUSTER = Cluster(model="Qwen2.5-32B", device="a100-40g-pcie", num_stages=4, pool_tokens=1)
MOST_TOKENS = 1024


class NobodyKnowsWhen(StepScheduler):
    """Requests may draw many tokens, and end before that, as `StopRules` cannot tell."""

    def add(self, request: Request) -> Request | None:
        length = request.stops.max_new_tokens

        def check(output_ids: list[int]) -> FinishReason | None:
            return FinishReason("stop") if len(output_ids) >= length else None

        request.stops = StopRules(max_new_tokens=MOST_TOKENS, check_text=check)
        return super().add(request)


@dataclass(frozen=True)
class Told:
    """A forecast, and the moments that it was about."""

    forecast: RequestForecast
    now_s: float
    request: Request

    @property
    def errors(self) -> list[float]:
        """Of both moments, over what was to be waited; a tenth of a second at least."""
        request, forecast = self.request, self.forecast
        assert request.started_s is not None and request.first_token_s is not None
        pairs = [(forecast.next_token_in_s, request.first_token_s - self.now_s)]
        if request.started_s > self.now_s:
            pairs.append((forecast.runs_in_s, request.started_s - self.now_s))
        return [(told - was) / max(was, 0.1) for told, was in pairs if told is not None]


def forecasts(
    pool_tokens: int,
    policy: str,
    *,
    asks_running: bool = False,
    every_s: float = 0.5,
    most_steps: int | None = None,
    **options: int,
) -> list[Told]:
    """A hundred requests at once; every so often some that wait are forecast, or that decode."""
    scheduler = NobodyKnowsWhen(
        SchedulingArgs(**options),  # type: ignore[arg-type]
        make_policy(ThrottleArgs(policy=policy)),
        num_pages=pool_tokens // 16,
        num_stages=4,
        context_length=pool_tokens,
    )
    costs = CLUSTER.costs()
    plan = StagePlan(0, costs.layer_counts)
    known = None
    if policy == "throttle-time":
        predictor = StepPredictor(fitted_costs(costs.stage, plan.num_layers))
        known = StepForecast(plan, predictor, learns=False)
    pipeline, random, ids = VirtualPipeline(scheduler, costs, known), Random(1), TokenIds()
    requests = [
        SimulatedRequest(
            arrival_s=0.0,
            prompt=(ids.fresh(random.randint(100, 2000)),),
            output=ids.fresh(random.randint(20, 200)),
        )
        for _ in range(100)
    ]
    told: list[Told] = []
    asked_s = -1.0

    def ask(_: int, now_s: float) -> None:
        nonlocal asked_s
        if now_s - asked_s < every_s:
            return
        asked_s = now_s
        asked = [
            one for one in scheduler.requests() if (one.first_token_s is not None) is asks_running
        ]
        for request in random.sample(asked, min(3, len(asked))):
            outlook = scheduler.outlook(request.request_id)
            assert outlook is not None
            told.append(Told(pipeline._core.forecast(outlook, now_s), now_s, request))

    pipeline.run(requests, ask, most_steps)
    return told


def errors(told: Sequence[Told]) -> list[float]:
    return [error for one in told for error in one.errors]


@pytest.mark.parametrize(
    "policy", ["throttle-time", "throttle", "sarathi", "throttle-adaptive", "greedy-queue"]
)
def test_a_queue_that_waits_for_compute_is_foreseen_closely(policy: str) -> None:
    found = errors(forecasts(400_000, policy))
    assert len(found) >= 25
    assert median(map(abs, found)) < 0.05
    assert max(map(abs, found)) < 0.3


@pytest.mark.parametrize("policy", ["throttle-time", "throttle", "sarathi"])
@pytest.mark.parametrize(
    ("pool_tokens", "every_s", "options"),
    [(400_000, 2.0, {"max_running_requests": 16}), (40_000, 0.5, {})],
)
def test_a_queue_that_waits_for_answers_to_end_is_foreseen_roughly(
    policy: str, pool_tokens: int, every_s: float, options: dict[str, int]
) -> None:
    found = errors(forecasts(pool_tokens, policy, every_s=every_s, **options))
    assert len(found) >= 100
    assert abs(median(found)) < 0.2
    assert sum(abs(error) < 0.75 for error in found) > 0.8 * len(found)


def test_a_decode_is_forecast_while_others_wait_for_places() -> None:
    told = forecasts(
        400_000,
        "throttle-time",
        asks_running=True,
        every_s=1.0,
        most_steps=3000,
        max_running_requests=4,
    )
    known = [one.forecast for one in told if not one.forecast.reason]
    assert len(known) > 100
    for forecast in known:
        assert forecast.runs_in_s == 0.0 and forecast.next_token_in_s is not None
        assert forecast.next_token_in_s < 1.0


def test_before_any_answer_has_ended_a_full_house_is_unknown() -> None:
    told = forecasts(400_000, "throttle", most_steps=600, max_running_requests=2)
    assert any(one.forecast.num_ended > 1 for one in told)
    unknown = [one for one in told if one.forecast.reason]
    assert unknown[0].forecast.reason.endswith(
        "steps of this plan have been measured, too few to tell"
    )
    nobody = [one for one in unknown if "none has ended" in one.forecast.reason]
    assert nobody and all(one.forecast.runs_in_s is None for one in nobody)
    assert all(one.forecast.num_ended == 0 for one in nobody)


def test_steps_in_flight_give_what_their_drafts_are_expected_to() -> None:
    """An answer that others wait for is drafted no more, but its newest step has drafts."""
    scheduler = new_scheduler(
        SchedulingArgs(max_running_requests=1, draft_tokens=3),
        num_pages=4_000,
        num_stages=4,
        context_length=10_000,
    )
    pipeline, ids = VirtualPipeline(scheduler, CLUSTER.costs()), TokenIds()
    first, running, late = (
        SimulatedRequest(
            arrival_s=arrival_s,
            prompt=(ids.fresh(50),),
            output=ids.fresh(60),
            acceptance=DraftAcceptance((1.0,)),
        )
        for arrival_s in (0.0, 10.0, 10.6)
    )
    told: list[Told] = []

    def ask(_: int, now_s: float) -> None:
        waiting = [one for one in scheduler.requests() if one.started_s is None]
        chunks = [one for step in pipeline._core.open_steps for one in step.microbatch.chunks]
        if waiting and any(chunk.draft_ids for chunk in chunks):
            outlook = scheduler.outlook(waiting[0].request_id)
            assert outlook is not None
            told.append(Told(pipeline._core.forecast(outlook, now_s), now_s, waiting[0]))

    pipeline.run([first, running, late], ask)
    assert told and max(map(abs, errors(told))) < 0.03


def test_a_forecast_changes_nothing() -> None:
    def steps(asks: bool) -> list[tuple[int, int]]:
        scheduler = new_scheduler(
            throttle=ThrottleArgs(max_prefill_tokens=16, min_prefill_tokens=4),
            num_pages=40,
            num_stages=2,
            context_length=150,
        )
        pipeline = FakePipeline(scheduler, 4)
        random = Random(3)
        for number in range(12):
            prompt = [random.randrange(3) for _ in range(random.randrange(1, 40))]
            scheduler.add(make_request(str(number), prompt, 9))
        for _ in range(300):
            pipeline.fill()
            if pipeline.steps_in_flight:
                pipeline.complete()
            pipeline.now_s += 0.25
            for request in scheduler.requests() if asks else ():
                outlook = scheduler.outlook(request.request_id)
                assert outlook is not None
                pipeline.core.forecast(outlook, pipeline.now_s)
        assert scheduler.is_idle
        return [(one.num_prefill_tokens, one.num_decodes) for one in pipeline.microbatches]

    assert steps(asks=True) == steps(asks=False)


def test_a_forecast_sees_the_loads_that_come() -> None:
    """The prompts that wait, and how much of the one that is begun, as the scheduler meets them."""
    pipeline = new_pipeline(
        throttle=ThrottleArgs(policy="sarathi", max_prefill_tokens=16, min_prefill_tokens=1),
        num_pages=100,
        num_stages=2,
    )
    pipeline.scheduler.add(make_request("paced", [9], max_new_tokens=10))
    pipeline.drain()
    for number, length in enumerate((40, 30, 20)):
        pipeline.scheduler.add(make_request(str(number), [number] * length, max_new_tokens=1))
    pipeline.fill()
    outlook = pipeline.scheduler.outlook("2")
    assert outlook is not None
    foreseen: dict[int, tuple[int, ...]] = {}

    def policy(load: PipelineLoad) -> TokenBudget:
        foreseen[load.step_id] = prompts_of(load)
        return outlook.policy(load)

    forecast = pipeline.core.forecast(replace(outlook, policy=policy), pipeline.now_s)
    assert forecast.next_token_in_s is not None
    first = pipeline.scheduler.next_step_id
    pipeline.drain()
    came = {
        step.step_id: prompts_of(step.load)
        for step in pipeline.microbatches
        if step.step_id >= first
    }
    assert came == {step_id: foreseen[step_id] for step_id in came}
    assert [begun for *_, begun in came.values()] == [8, 22, 6, 10]


def prompts_of(load: PipelineLoad) -> tuple[int, ...]:
    return load.waiting_tokens, load.prompts, load.first_prompt_tokens
