"""The load of `benchmark.serving.fair_tenants` in virtual time: a tenant that has had a server for
itself, then another one that floods it."""

from dataclasses import dataclass

from support.pipelines import new_scheduler
from support.saved_costs import flat

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.costs.step_costs import LayerCost, RowCost, StepCosts
from sgl_pipeline.simulator.predicted_pipeline import PredictedPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds

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
