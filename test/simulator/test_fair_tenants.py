"""The load of `benchmark.serving.fair_tenants` in virtual time: a tenant that has had a server for
itself, then another one that floods it; and a flood of a server that knows no times yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
from support.pipelines import new_scheduler
from support.saved_costs import flat

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.costs.step_costs import LayerCost, RowCost, StepCosts
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.scheduling import short_steps
from sgl_pipeline.simulator.predicted_pipeline import PredictedPipeline, PredictedTiming
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.step_work import StepWork

# Of two stages: 15 ms a step, as weights are read, and 0.3 ms a token.
LAYER = LayerCost(RowCost((1.0,), (15.3 / 8,), 0.3 / 8), 0.0, 0.0001, 0.00001)
COSTS = StepCosts(LAYER, flat(0.0), flat(0.0), (1.0,) * 16)
# A request of the light tenant takes a tenth of the time in prefill.
LIGHT_PERIOD_S, FLOOD_FROM_S, UNTIL_S = 0.7, 8.0, 28.0


@dataclass(frozen=True)
class Served:
    """Milliseconds to the first tokens of the light tenant's requests, and tokens of all beside the
    flood."""

    alone_ms: list[float]
    beside_ms: list[float]
    tokens: int


def workload() -> list[SimulatedRequest]:
    ids = TokenIds()

    def request(arrival_s: float, inputs: int, outputs: int, tenant: str) -> SimulatedRequest:
        prompt, output = (ids.fresh(inputs),), ids.fresh(outputs)
        return SimulatedRequest(arrival_s=arrival_s, prompt=prompt, output=output, tenant=tenant)

    moments_s = [LIGHT_PERIOD_S * (place + 0.5) for place in range(int(UNTIL_S / LIGHT_PERIOD_S))]
    light = [request(moment_s, 64, 16, "light") for moment_s in moments_s]
    flood = []
    for client in range(16):
        # As in the benchmark, first answers have all lengths.
        turns = [request(FLOOD_FROM_S, 512, 2 * (client + 1), "flood")]
        turns += [request(0.0, 512, 32, "flood") for _ in range(12)]
        flood.append(SimulatedRequest.chain(turns))
    return [*light, *flood]


def serve(fair_shares_by: str | None) -> Served:
    args = SchedulingArgs(max_running_requests=8, radix_cache=False, fair_shares_by=fair_shares_by)
    scheduler = new_scheduler(args, ThrottleArgs(), num_pages=4000, num_stages=2)
    pipeline = PredictedPipeline(costs=COSTS, num_stages=2, pool_tokens=64_000)
    virtual = pipeline.pipeline(scheduler, args.page_size, is_timed=True)
    for asked in workload():
        virtual.clients.expect(asked, asked.arrival_s)
    while virtual.next_turn_s < UNTIL_S:
        virtual.turn(virtual.next_turn_s)
    alone_ms, beside_ms, tokens = [], [], 0
    for one in virtual.result().requests:
        if one.arrival_s >= FLOOD_FROM_S:
            tokens += len(one.token_times_s) + one.asked.input_tokens * bool(one.token_times_s)
        if one.asked.tenant == "light" and one.token_times_s:
            into = beside_ms if one.arrival_s >= FLOOD_FROM_S else alone_ms
            into.append(1e3 * (one.token_times_s[0] - one.arrival_s))
    return Served(alone_ms, beside_ms, tokens)


def test_a_flood_makes_the_tenant_that_was_there_wait_for_a_step_and_no_more() -> None:
    shared, fcfs = serve("user"), serve(None)
    assert len(shared.beside_ms) >= 25
    assert max(shared.beside_ms) < 1.7 * max(shared.alone_ms)
    assert min(fcfs.beside_ms[-10:]) > 10 * max(fcfs.alone_ms), "there is a flood"
    assert shared.tokens > 0.97 * fcfs.tokens


# Of a server on slower cores, that learns what steps take.
COLD_SLOWNESS, COLD_PERIOD_S, COLD_UNTIL_S = 3.0, 1.5, 25.0
SEEDS = range(5)
POLICIES = ("throttle-time", "sarathi")


@dataclass(frozen=True)
class ColdServed:
    """`waits` are the seconds to the first token of each request of the light tenant, by when it
    came, at least until the end where there is none; `works` those of all steps, `tokens` of all;
    times were known at `known_s`."""

    waits: dict[float, float]
    works: list[StepWork]
    tokens: int
    known_s: float

    def waits_s(self, until_s: float) -> list[float]:
        """Of the requests that came before."""
        return [wait_s for moment_s, wait_s in self.waits.items() if moment_s < until_s]


def cold_workload(
    seed: int, light_from_s: float, light_tenant: str = "light"
) -> list[SimulatedRequest]:
    """The flood begins at once; from `light_from_s` on requests of the other tenant come at
    random."""
    rng, ids = Random(seed), TokenIds()

    def request(arrival_s: float, inputs: int, outputs: int, tenant: str) -> SimulatedRequest:
        prompt, output = (ids.fresh(inputs),), ids.fresh(outputs)
        return SimulatedRequest(arrival_s=arrival_s, prompt=prompt, output=output, tenant=tenant)

    requests, moment_s = [], light_from_s
    while moment_s < COLD_UNTIL_S:
        requests.append(request(moment_s, rng.randint(32, 96), 16, light_tenant))
        moment_s += rng.expovariate(1.0 / COLD_PERIOD_S)
    for client in range(16):
        turns = [request(0.0, rng.randint(384, 640), 2 * (client + 1), "flood")]
        turns += [request(0.0, rng.randint(384, 640), 32, "flood") for _ in range(12)]
        requests.append(SimulatedRequest.chain(turns))
    return requests


def serve_cold(policy: str, workload: Sequence[SimulatedRequest]) -> ColdServed:
    args = SchedulingArgs(max_running_requests=8, radix_cache=False, fair_shares_by="user")
    scheduler = new_scheduler(args, ThrottleArgs(policy=policy), num_pages=4000, num_stages=2)
    timing = PredictedTiming(StepPredictor(COSTS), (8, 8), COLD_SLOWNESS)
    virtual = VirtualPipeline(scheduler, timing, StepForecast(StagePlan(0, (8, 8))))
    for asked in workload:
        virtual.clients.expect(asked, asked.arrival_s)
    known_s = float("inf")
    while virtual.next_turn_s < COLD_UNTIL_S:
        now_s = virtual.turn(virtual.next_turn_s)
        if scheduler.step_times is not None:
            known_s = min(known_s, now_s)
    result = virtual.result()
    waits, tokens = {}, 0
    for one in result.requests:
        tokens += len(one.token_times_s) + one.asked.input_tokens * bool(one.token_times_s)
        if one.asked.tenant == "light":
            first_s = one.token_times_s[0] if one.token_times_s else COLD_UNTIL_S
            waits[one.arrival_s] = first_s - one.arrival_s
    return ColdServed(waits, [step.record.work for step in result.steps], tokens, known_s)


def policy_length_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without times, steps are as long as the policy makes them."""
    monkeypatch.setattr(short_steps, "first_steps_tokens", lambda step_id: 10**9)


def before_and_after(
    policy: str, light_from_s: float, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[ColdServed, ColdServed]]:
    """Of each seed: with first steps of the policy's length, and with short ones."""
    loads = [cold_workload(seed, light_from_s) for seed in SEEDS]
    with monkeypatch.context() as patched:
        policy_length_first(patched)
        before = [serve_cold(policy, load) for load in loads]
    return list(zip(before, (serve_cold(policy, load) for load in loads), strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_who_comes_with_a_flood_of_a_cold_server_waits_for_short_steps(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for old, new in before_and_after(policy, 0.0, monkeypatch):
        # In the seconds in which long first steps leave times unknown.
        longest_s, before_s = max(new.waits_s(old.known_s)), max(old.waits_s(old.known_s))
        assert before_s > 2.0, "steps of the policy are long"
        assert longest_s < 0.4 * before_s
        assert new.known_s < old.known_s
        assert new.tokens > old.tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_who_comes_after_a_flood_of_a_cold_server_waits_no_longer_than_for_its_first_steps(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = before_and_after(policy, 0.5, monkeypatch)
    # None of the steps on their way is recalled: who comes meanwhile waits for all of them.
    for old, new in pairs:
        assert max(new.waits_s(old.known_s)) < 1.05 * max(old.waits_s(old.known_s))
        assert new.known_s < old.known_s
        assert new.tokens > 0.99 * old.tokens
    sums_s = [(sum(old.waits_s(old.known_s)), sum(new.waits_s(old.known_s))) for old, new in pairs]
    assert sum(new_s for _, new_s in sums_s) < 0.9 * sum(old_s for old_s, _ in sums_s)
    assert sum(new.tokens for _, new in pairs) > sum(old.tokens for old, _ in pairs)


def test_one_tenant_alone_on_a_cold_server_has_the_steps_of_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = cold_workload(0, 0.0, "flood")
    alone = serve_cold("throttle-time", load)
    policy_length_first(monkeypatch)
    assert serve_cold("throttle-time", load) == alone
