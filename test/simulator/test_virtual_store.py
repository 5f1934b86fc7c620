"""A store in virtual time against times made by hand, and what a pipeline gains and risks by it."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from support.pipelines import new_scheduler
from support.virtual_runs import MANUAL, TokenSeconds

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.args.tier_args import (
    PREFETCH_POLICIES,
    WRITE_POLICIES,
    PrefetchPolicy,
    WritePolicy,
)
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.simulator.experiment import SERVER_RULES, Cluster, simulate
from sgl_pipeline.simulator.page_copies import MoveCosts
from sgl_pipeline.simulator.pipeline_costs import PipelineCosts
from sgl_pipeline.simulator.simulation import ServedRequest, Simulation
from sgl_pipeline.simulator.summary import latency
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.virtual_store import SIMULATED_PLACE, Eviction, StoreCosts, VirtualStore
from sgl_pipeline.simulator.workload import Segment, SimulatedRequest, TokenIds
from sgl_pipeline.stage_plan import StagePlan

PAGE_TOKENS = 4
LAYER_PAGE_BYTES = 100
COSTS = PipelineCosts(TokenSeconds(token=1.0), layer_counts=(2, 1))
PATIENT = TierRules(least_tokens=4, wait_policy="wait_complete")
FOREVER = float("inf")


class WatchedStore(VirtualStore):
    """Holds itself and the scheduler to what must be true at any time."""

    def __init__(self, costs: StoreCosts, num_layers: int) -> None:
        super().__init__(costs, LAYER_PAGE_BYTES, num_layers)
        self.most_bytes = costs.capacity_bytes

    def exchange(self, core: PipelineCore, now_s: float) -> None:
        super().exchange(core, now_s)
        core.scheduler.check_invariants()
        assert self.held_bytes <= self.most_bytes


def new_store(
    capacity_pages: float = FOREVER,
    read_bytes_per_s: float = FOREVER,
    write_bytes_per_s: float = FOREVER,
    save_bytes_per_s: float = FOREVER,
    latency_s: float = 0.5,
    eviction: Eviction = "lru",
) -> WatchedStore:
    costs = StoreCosts(
        capacity_bytes=capacity_pages * 3 * LAYER_PAGE_BYTES,
        read_bytes_per_s=read_bytes_per_s,
        write_bytes_per_s=write_bytes_per_s,
        save_bytes_per_s=save_bytes_per_s,
        latency_s=latency_s,
        eviction=eviction,
    )
    return WatchedStore(costs, num_layers=3)


def run(
    workload: Sequence[SimulatedRequest],
    store: VirtualStore | None,
    rules: TierRules = PATIENT,
    num_pages: int = 1000,
    wishes: Sequence[tuple[float, tuple[int, ...]]] = (),
) -> Simulation:
    """A new pipeline, as after a restart, over what `store` holds."""
    scheduler = new_scheduler(
        SchedulingArgs(page_size=PAGE_TOKENS),
        ThrottleArgs(policy="sarathi", max_prefill_tokens=64),
        num_pages=num_pages,
        num_stages=COSTS.num_stages,
    )
    if store is not None:
        scheduler.tier.use(SIMULATED_PLACE, rules)
    control = MigrationControl.of(MANUAL, StagePlan(0, COSTS.layer_counts)) if wishes else None
    moves = MoveCosts(page_size=PAGE_TOKENS)
    return VirtualPipeline(scheduler, COSTS, None, control, moves, (), wishes, store).run(workload)


def ask(
    prompt: int, num_pages: int = 4, arrival_s: float = 0.0, num_tokens: int = 3
) -> SimulatedRequest:
    """A request for `num_tokens`, behind `num_pages` pages and a token of prompt `prompt`."""
    length = num_pages * PAGE_TOKENS + 1
    first = 1000 * prompt
    return SimulatedRequest(
        arrival_s=arrival_s,
        prompt=(Segment(first, length),),
        output=Segment(first + 500, num_tokens),
    )


def served(store: VirtualStore, request: SimulatedRequest) -> ServedRequest:
    (one,) = run([request], store).requests
    return one


def test_a_load_takes_its_latency_and_the_bytes_of_the_slowest_stage() -> None:
    store = new_store(read_bytes_per_s=100.0)
    first, again = served(store, ask(1)), served(store, ask(1))
    assert (first.token_times_s[0], first.loaded_tokens) == (0.5 + 17 * 3, 0)
    # Answered at 0.5; two layers of four pages on the first stage; then one token.
    assert again.loaded_tokens == again.cached_tokens == 16
    assert again.token_times_s[0] == 0.5 + 0.5 + 8 * LAYER_PAGE_BYTES / 100.0 + 3


def test_transfers_of_one_kind_follow_each_other() -> None:
    store = new_store(read_bytes_per_s=100.0)
    run([ask(1), ask(2)], store)
    simulation = run([ask(1), ask(2)], store)
    starts_s = [served.token_times_s[0] for served in simulation.requests]
    assert starts_s[0] == 0.5 + 0.5 + 8 + 3
    # The second load is on its way while the first request's token is computed.
    assert starts_s[1] == 0.5 + 2 * (0.5 + 8) + 3


def test_a_save_keeps_to_its_rate_and_holds_nobody_up() -> None:
    fast, slow = new_store(), new_store(save_bytes_per_s=1.0)
    steps = [run([ask(1, 8)], store).steps for store in (fast, slow)]
    assert steps[0] == steps[1]
    assert fast.held_bytes == 8 * 3 * LAYER_PAGE_BYTES
    assert slow.held_bytes == 0  # 1,600 s for the first stage alone


@pytest.mark.parametrize(("eviction", "kept"), [("lru", 1), ("fifo", 2)])
def test_the_store_evicts_by_its_rule(eviction: Eviction, kept: int) -> None:
    store = new_store(capacity_pages=8, eviction=eviction)
    for prompt in (1, 2, 1, 3):
        served(store, ask(prompt))
    assert store.num_evicted == 4
    assert served(store, ask(kept)).loaded_tokens == 16
    assert served(store, ask(3 - kept)).loaded_tokens == 0


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    store = new_store(capacity_pages=8)
    served(store, ask(1))
    served(store, ask(1))
    served(store, ask(2, num_pages=6))
    assert served(store, ask(1)).loaded_tokens == 2 * PAGE_TOKENS


def test_pages_that_are_evicted_while_a_load_waits_for_room_are_computed() -> None:
    store = new_store(capacity_pages=16)
    served(store, ask(1, num_pages=8))
    # The first request fills the pool, and its pages the store, once the second has been found.
    load = [ask(2, num_pages=16, num_tokens=12), ask(1, num_pages=8, arrival_s=1.0)]
    simulation = run(load, store, num_pages=24)
    tier = simulation.tier
    assert tier is not None
    assert (tier.num_hits, tier.loaded_tokens, tier.num_broken_pages) == (1, 0, 2)
    assert all(one.finished_s is not None for one in simulation.requests)


def test_a_late_load_costs_the_patience_and_no_more() -> None:
    store = new_store(read_bytes_per_s=1.0)  # 800 s
    served(store, ask(1))
    rules = TierRules(least_tokens=4, timeout_base_s=2.0, timeout_s_per_ki_token=0.0)
    (late,) = run([ask(1)], store, rules).requests
    assert late.cached_tokens == 0
    assert late.token_times_s[0] == pytest.approx(0.5 + 2.0 + 17 * 3, abs=0.2)


def mixed_load(random: Random, num_requests: int) -> list[SimulatedRequest]:
    """Requests of three turns that share beginnings with others."""
    ids = TokenIds()
    shared = [ids.fresh(40) for _ in range(4)]
    chains = []
    for _ in range(num_requests):
        turns: list[SimulatedRequest] = []
        history = [Segment(random.choice(shared).first, random.randint(4, 40))]
        for _ in range(3):
            history.append(ids.fresh(random.randint(1, 12)))
            output = ids.fresh(random.randint(1, 12))
            turns.append(
                SimulatedRequest(arrival_s=0.0, prompt=(*history,), output=output, think_s=99.0)
            )
            history.append(output)
        chains.append(replace(SimulatedRequest.chain(turns), arrival_s=random.uniform(0, 400)))
    return chains


@pytest.mark.parametrize("policy", WRITE_POLICIES)
@pytest.mark.parametrize("wait", PREFETCH_POLICIES)
def test_under_pressure_all_are_served_and_equal_runs_are_equal(
    policy: WritePolicy, wait: PrefetchPolicy
) -> None:
    rules = TierRules(least_tokens=8, write_policy=policy, wait_policy=wait)
    load = mixed_load(Random(5), 12)
    runs = []
    for _ in range(2):
        store = new_store(capacity_pages=12, read_bytes_per_s=2000.0, save_bytes_per_s=500.0)
        simulation = run(load, store, rules, num_pages=48)
        assert all(one.finished_s is not None for one in simulation.requests)
        assert len(simulation.requests) == 36
        assert simulation.tier is not None and simulation.tier.saved_tokens > 0
        assert store.num_evicted > 0
        runs.append((simulation.steps, simulation.tier))
    assert runs[0] == runs[1]


def test_a_move_of_layers_cancels_transfers_and_loses_no_request() -> None:
    load = mixed_load(Random(5), 12)
    store = new_store(read_bytes_per_s=200.0, save_bytes_per_s=100.0)
    wishes = [(100.0 + 200.0 * turn, (1, 2) if turn % 2 else (2, 1)) for turn in range(1, 6)]
    simulation = run(load, store, TierRules(least_tokens=8), num_pages=48, wishes=wishes)
    assert all(one.finished_s is not None for one in simulation.requests)
    assert [move.outcome for move in simulation.moves].count("done") >= 2


def test_a_store_that_nothing_is_asked_of_changes_no_step() -> None:
    load = mixed_load(Random(7), 12)
    plain = run(load, None)
    silent = run(load, new_store(save_bytes_per_s=10.0), TierRules(least_tokens=10**6))
    # A page that is being saved counts as used; else they are the same, to the last digit.
    assert [(one.shape, one.starts_s, one.ends_s) for one in silent.steps] == [
        (one.shape, one.starts_s, one.ends_s) for one in plain.steps
    ]
    assert plain.tier is None and silent.tier is not None


def test_pages_wait_in_the_pool_for_those_who_want_them() -> None:
    """A load that evicted what another one has brought would bring nothing but work."""
    store = new_store(latency_s=0.01)
    prompts = range(1, 9)
    for prompt in prompts:
        served(store, ask(prompt, num_pages=8))
    # One prompt and answer at a time; the others wait, and their pages come meanwhile.
    simulation = run([ask(prompt, num_pages=8) for prompt in prompts], store, num_pages=24)
    assert [one.cached_tokens for one in simulation.requests] == [32] * 8
    assert simulation.tier is not None and simulation.tier.loaded_tokens == 32 * 8


CLUSTER = Cluster(model="Qwen2.5-14B", device="a100-40g-pcie", num_stages=2, pool_tokens=8192)


def returning(num_conversations: int) -> list[SimulatedRequest]:
    """Conversations that come back one after the other, each after others took the pool."""
    ids, requests = TokenIds(), []
    for number in range(num_conversations):
        first = ids.fresh(4000)
        answer = ids.fresh(8)
        again = SimulatedRequest(
            arrival_s=0.0,
            prompt=(first, answer, ids.fresh(30)),
            output=ids.fresh(8),
        )
        requests.append(
            SimulatedRequest(
                arrival_s=20.0 * number,
                prompt=(first,),
                output=answer,
                follow_up=again,
                think_s=20.0 * num_conversations,
            )
        )
    return requests


def second_turns_ms(store: StoreCosts | None, rules: TierRules = SERVER_RULES) -> list[float]:
    """TTFT of the conversations that return."""
    cluster = replace(CLUSTER, store=store, tier_rules=rules)
    simulation = simulate(
        cluster, ThrottleArgs(policy="throttle"), SchedulingArgs(page_size=16), returning(6)
    )
    second = [one for one in simulation.requests if one.asked.input_tokens > 4000]
    return [one.ttft_ms for one in filter(None, map(latency, second))]


def speed(bytes_per_s: float) -> StoreCosts:
    return StoreCosts(
        capacity_bytes=1e12,
        read_bytes_per_s=bytes_per_s,
        write_bytes_per_s=bytes_per_s,
        save_bytes_per_s=1e12,
        latency_s=1e-3,
    )


def test_a_fast_store_makes_returning_conversations_faster() -> None:
    off_ms, on_ms = second_turns_ms(None), second_turns_ms(speed(5e9))
    assert len(on_ms) == len(off_ms) == 6
    assert max(on_ms) < 0.5 * min(off_ms)


def test_a_slow_store_is_tried_once_and_then_left_alone() -> None:
    off_ms, on_ms = second_turns_ms(None), second_turns_ms(speed(50e6))
    assert on_ms[0] > off_ms[0]
    assert on_ms[1:] == pytest.approx(off_ms[1:], rel=0.01)


def test_who_does_not_wait_loses_nothing_to_a_slow_store() -> None:
    rules = TierRules(wait_policy="best_effort")
    off_ms, on_ms = second_turns_ms(None), second_turns_ms(speed(50e6), rules)
    assert on_ms == pytest.approx(off_ms, rel=0.01)
