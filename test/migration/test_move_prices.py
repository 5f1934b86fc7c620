"""A layer with states costs more the more slots hold anything; what moves cost is learned."""

from random import Random

import pytest
from support.moves import movable_core, stages_get_ready, stages_switch
from support.planners import proposals
from support.served_steps import ServedSteps, decode_step, flat_costs

from sgl_pipeline.migration.move_prices import MovePrices
from sgl_pipeline.migration.planner import LayerPlanner
from sgl_pipeline.migration.planner_args import PlannerArgs
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.stage_plan import StagePlan

# Three layers of four with states of 1000 bytes.
STATE_BYTES = (1000, 1000, 1000, 0) * 2
ARGS = PlannerArgs(move_price_s=0.5, layer_price_s=0.1, state_byte_price_s=1e-4)


def test_a_price_by_hand() -> None:
    prices = MovePrices(ARGS, STATE_BYTES, lambda: 5)
    assert prices.of([3]) == pytest.approx(0.5 + 0.1)
    # 5 slots of 1000 bytes at 0.1 ms each.
    assert prices.of([2]) == pytest.approx(0.5 + 0.1 + 0.5)
    assert prices.of([2, 3, 4]) == pytest.approx(0.5 + 0.3 + 1.0)
    assert MovePrices(ARGS).of([2, 3, 4]) == pytest.approx(0.8)


@pytest.mark.parametrize("seed", range(20))
def test_each_byte_of_each_slot_of_each_layer_counts_once(seed: int) -> None:
    rng = Random(seed)
    state_bytes = [rng.choice((0, 7, 1000)) for _ in range(12)]
    in_use = rng.sample(range(40), rng.randint(0, 40))
    layers = sorted(rng.sample(range(12), rng.randint(1, 12)))
    moved = [
        (layer, slot, byte)
        for layer in layers
        for slot in in_use
        for byte in range(state_bytes[layer])
    ]
    expected = 0.5 + 0.1 * len(layers) + 1e-4 * len(moved)
    assert MovePrices(ARGS, state_bytes, lambda: len(in_use)).of(layers) == pytest.approx(expected)


def test_a_byte_costs_what_steps_waited_for_those_of_the_switch() -> None:
    slots = [4]
    prices = MovePrices(PlannerArgs(), STATE_BYTES, lambda: slots[0])
    # 3 of the 4 slots went at the switch, in 30 ms: 10 us a byte, 40 ms for all four. What is left
    # of 100 ms is the layer's own.
    prices.learn([0], stalled_s=0.03, shared_s=0.07, patched_bytes=3000)
    assert prices.of([0]) == pytest.approx(0.06 + 0.04)
    assert prices.of([3]) == pytest.approx(0.06)
    slots[0] = 64
    assert prices.of([0]) == pytest.approx(0.06 + 0.64)
    # A layer without states tells nothing of bytes.
    prices.learn([3], stalled_s=0.001, shared_s=0.019, patched_bytes=50)
    assert prices.of([0, 3]) == pytest.approx(0.04 + 0.64)
    # Two layers, one with states; nothing is left for the layers themselves.
    prices.learn([2, 3], stalled_s=0.5, shared_s=0.0, patched_bytes=40_000)
    assert prices.of([2, 3]) == pytest.approx(0.5)
    assert prices.of([3]) == 0.0
    # No slot holds anything now: nothing is known of bytes.
    slots[0] = 0
    prices.learn([0], stalled_s=1.0, shared_s=0.25, patched_bytes=10)
    slots[0] = 32
    assert prices.of([0]) == pytest.approx(1.25 + 0.25)


def test_few_bytes_that_waited_for_a_long_step_do_not_price_the_rest_like_them() -> None:
    """17 states of 2 MiB in 2 s, which is 60 ns a byte, and 90 s for all slots of a layer."""
    prices = MovePrices(PlannerArgs(), (2 * 2**20,) * 4, lambda: 768)
    prices.learn([1], stalled_s=2.0, shared_s=0.5, patched_bytes=17 * 2 * 2**20)
    assert prices.of([2]) == pytest.approx(2.5)
    assert prices.of([1, 2]) == pytest.approx(5.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_move_is_priced_at_what_the_same_one_has_just_cost(seed: int) -> None:
    rng = Random(seed)
    state_bytes = [rng.choice((0, 7, 1000)) for _ in range(12)]
    prices = MovePrices(PlannerArgs(), state_bytes, lambda: num_slots)
    for _ in range(20):
        num_slots = rng.randint(1, 800)
        layers = sorted(rng.sample(range(12), rng.randint(1, 12)))
        stalled_s, shared_s = rng.choice((0.0, 0.01, 3.0)), rng.choice((0.0, 0.2))
        most = num_slots * sum(state_bytes[layer] for layer in layers)
        prices.learn(
            layers, stalled_s=stalled_s, shared_s=shared_s, patched_bytes=rng.randint(1, most + 1)
        )
        assert prices.of(layers) == pytest.approx(stalled_s + shared_s)


def test_moves_that_are_free_stay_free() -> None:
    prices = MovePrices(PlannerArgs.as_published(), STATE_BYTES, lambda: 5)
    prices.learn([0], stalled_s=1.0, shared_s=1.0, patched_bytes=5000)
    assert prices.of([0, 1]) == 0.0


@pytest.mark.parametrize(("num_slots", "after_steps"), [(0, 25), (10, 35)])
def test_a_move_waits_until_staying_has_cost_as_much_as_its_states(
    num_slots: int, after_steps: int
) -> None:
    """Each step loses 1 ms; the layer costs 5 ms, and 10 slots another 10."""
    served = ServedSteps(flat_costs(8, tail_ms=2.0), StagePlan(0, (4, 4)))
    args = PlannerArgs(layer_price_s=0.005, state_byte_price_s=1e-6)
    prices = MovePrices(args, (1000,) * 8, lambda: num_slots)
    forecast = StepForecast(served.plan, served.truth)
    planner = LayerPlanner(args, served.plan, forecast, prices=prices)
    assert proposals(planner, served, [decode_step(4)] * 100)[0][0] == after_steps


def test_the_planner_of_a_server_learns_from_a_move_that_is_done() -> None:
    served = ServedSteps(flat_costs(8, tail_ms=2.0), StagePlan(0, (4, 4)))
    slots = [4]
    prices = MovePrices(PlannerArgs(), (10,) * 8, lambda: slots[0])
    forecast = StepForecast(served.plan, served.truth)
    planner = LayerPlanner(PlannerArgs(), served.plan, forecast, prices=prices)
    core = movable_core(4, 4, planner=planner)
    core.migration.move_to((3, 5), 0.0)
    stages_get_ready(core, 1.0)
    stages_switch(core, 1.0)
    # Ready after a second, of which stages gave a tenth; 20 bytes in 2 ms at the switch, so that
    # those of 4 slots cost 4 ms.
    assert prices.of([0]) == pytest.approx(0.102)
    slots[0] = 8
    assert prices.of([0]) == pytest.approx(0.106)
