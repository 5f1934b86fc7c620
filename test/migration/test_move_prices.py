"""A layer with states costs more the more slots hold anything; what moves cost is learned."""

from random import Random

import pytest
from support.moves import movable_core, stages_get_ready, stages_switch
from support.planners import proposals
from support.served_steps import ServedSteps, decode_step, flat_costs

from sgl_pipeline.migration import move_prices
from sgl_pipeline.migration.move_prices import LAST_MOVES, MANY_BYTES, MovePrices
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


# One state of two MiB in each of three layers of four.
MIB = 2**20
OF_TWO_MIB = (2 * MIB, 2 * MIB, 2 * MIB, 0)


def learn_at_rate(prices: MovePrices, byte_s: float, slots: int, times: int = 1) -> None:
    """Moves of layer 0 with so many slots in use, of which steps wait for three quarters; 0.2 s of
    each move are the layer's own."""
    for _ in range(times):
        patched = slots * 2 * MIB * 3 // 4
        stalled_s, shared_s = patched * byte_s, 0.2 + slots * 2 * MIB * byte_s / 4
        prices.learn([0], stalled_s=stalled_s, shared_s=shared_s, patched_bytes=patched)


def test_a_byte_costs_what_steps_waited_for_those_of_the_switch() -> None:
    slots = [64]
    prices = MovePrices(PlannerArgs(), OF_TWO_MIB, lambda: slots[0])
    before = prices.of([0])
    learn_at_rate(prices, 4e-9, 64)
    assert prices.of([0]) == before, "one move may have been slow"
    learn_at_rate(prices, 4e-9, 64)
    assert prices.of([0]) == pytest.approx(0.2 + 128 * MIB * 4e-9)
    assert prices.of([3]) == pytest.approx(0.2)
    assert prices.of([2, 3]) == pytest.approx(0.4 + 128 * MIB * 4e-9)
    slots[0] = 768
    assert prices.of([0]) == pytest.approx(0.2 + 1536 * MIB * 4e-9)
    # No slot holds anything: a layer without states, and one with them, tell nothing of bytes.
    slots[0] = 0
    for layer in (0, 3) * 2:
        prices.learn([layer], stalled_s=0.3, shared_s=0.1, patched_bytes=10)
    assert prices.of([0]) == pytest.approx(0.4)
    slots[0] = 768
    assert prices.of([0]) == pytest.approx(0.4 + 1536 * MIB * 4e-9)


def test_before_a_move_the_price_is_that_of_the_start() -> None:
    prices = MovePrices(PlannerArgs(), OF_TWO_MIB, lambda: 64)
    assert prices.of([0, 3]) == pytest.approx(0.2 + 128 * MIB * 1e-9)


@pytest.mark.parametrize("slow", [0.0, 0.1, 100.0])
@pytest.mark.parametrize("place", range(5))
def test_one_bad_move_changes_no_price(slow: float, place: int) -> None:
    """Four moves are alike, at 4 ns a byte; another one takes nothing, a tenth, or a hundred times
    as long. The first of two might be the bad one."""
    prices = MovePrices(PlannerArgs(), OF_TWO_MIB, lambda: 64)
    usual_s, at_start_s = 0.2 + 128 * MIB * 4e-9, prices.of([0])
    for number in range(5):
        if number == place:
            prices.learn([0], stalled_s=0.4 * slow, shared_s=0.3 * slow, patched_bytes=96 * MIB)
        else:
            learn_at_rate(prices, 4e-9, 64)
        assert prices.of([0]) <= usual_s * (1 + 1e-9)
        assert slow < 1.0 or prices.of([0]) >= at_start_s
    assert prices.of([0]) == pytest.approx(usual_s)


@pytest.mark.parametrize("few", [3, 7, 31])
def test_few_bytes_that_waited_for_a_long_step_do_not_price_many_like_them(few: int) -> None:
    """Three states of two MiB in 2 s are 318 ns a byte: 512 s for 768 slots, for which no planner
    would move a layer and learn better."""
    slots = [few]
    prices = MovePrices(PlannerArgs(), OF_TWO_MIB, lambda: slots[0])
    for _ in range(20):
        prices.learn([1], stalled_s=2.0, shared_s=0.5, patched_bytes=2 * few * MIB)
        assert prices.of([1]) <= 2.5 + 1e-9
    assert prices.of([1]) == pytest.approx(2.5)
    slots[0] = 768
    assert prices.of([1]) == pytest.approx(2.5 + (1536 - 2 * few) * MIB * 1e-9)
    learn_at_rate(prices, 4e-9, 768, times=4)
    assert prices.of([0]) == pytest.approx(0.2 + 1536 * MIB * 4e-9)
    slots[0] = few
    assert prices.of([0]) == pytest.approx(0.2 + 2 * few * MIB * 4e-9)


def test_few_bytes_of_many_that_waited_for_a_long_step_cost_no_more_than_the_move() -> None:
    """17 of 768 states, in 2 s."""
    prices = MovePrices(PlannerArgs(), OF_TWO_MIB, lambda: 768)
    for _ in range(3):
        prices.learn([1], stalled_s=2.0, shared_s=0.5, patched_bytes=34 * MIB)
    assert prices.of([2]) == pytest.approx(2.5)
    assert prices.of([1, 2]) == pytest.approx(5.0)


@pytest.mark.parametrize(("stalled_s", "shared_s"), [(2.0, 0.5), (0.0, 0.0)])
def test_a_move_that_patched_nothing_leaves_the_price_of_a_byte(
    stalled_s: float, shared_s: float
) -> None:
    """Its steps waited for something else, or for nothing."""
    slots = [64]
    prices = MovePrices(PlannerArgs(), OF_TWO_MIB, lambda: slots[0])
    for _ in range(LAST_MOVES):
        prices.learn([1], stalled_s=stalled_s, shared_s=shared_s, patched_bytes=0)
    of_64_s, of_768_s = 128 * MIB * 1e-9, 1536 * MIB * 1e-9
    assert prices.of([1]) == pytest.approx(max(stalled_s + shared_s, of_64_s))
    slots[0] = 768
    assert prices.of([1]) == pytest.approx(max(stalled_s + shared_s - of_64_s, 0.0) + of_768_s)


def test_the_price_follows_a_link_that_becomes_slower_and_faster() -> None:
    prices = MovePrices(PlannerArgs(), OF_TWO_MIB, lambda: 64)
    learn_at_rate(prices, 2e-9, 64, times=LAST_MOVES)
    fast_s, slow_s = 0.2 + 128 * MIB * 2e-9, 0.2 + 128 * MIB * 20e-9
    assert prices.of([0]) == pytest.approx(fast_s)

    def moves_until(price_s: float, byte_s: float) -> int:
        for number in range(1, LAST_MOVES + 1):
            learn_at_rate(prices, byte_s, 64)
            if prices.of([0]) == pytest.approx(price_s):
                return number
        raise AssertionError(f"not {price_s} s after {LAST_MOVES} moves")

    assert moves_until(slow_s, 20e-9) == 4
    assert moves_until(fast_s, 2e-9) == 2


@pytest.mark.parametrize("seed", range(40))
def test_a_move_that_was_made_three_times_is_priced_at_what_it_has_cost(seed: int) -> None:
    rng = Random(seed)
    state_bytes = [rng.choice((0, 7, 1000, 2 * MIB)) for _ in range(12)]
    num_slots = rng.choice((1, 20, 800))
    prices = MovePrices(PlannerArgs(), state_bytes, lambda: num_slots)
    layers = sorted(rng.sample(range(12), rng.randint(1, 12)))
    stalled_s, shared_s = rng.choice((0.0, 0.01, 3.0)), rng.choice((0.0, 0.2))
    most = num_slots * sum(state_bytes[layer] for layer in layers)
    patched_bytes = rng.randint(0, most)
    for _ in range(3):
        prices.learn(layers, stalled_s=stalled_s, shared_s=shared_s, patched_bytes=patched_bytes)
    # Few bytes, and those of moves that patched none, are not cheaper than at the start.
    least_s = most * 1e-9 if 3 * most < MANY_BYTES or not patched_bytes else 0.0
    assert prices.of(layers) == pytest.approx(max(stalled_s + shared_s, least_s))


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


def test_the_planner_of_a_server_learns_from_a_move_that_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(move_prices, "MANY_BYTES", 10)
    served = ServedSteps(flat_costs(8, tail_ms=2.0), StagePlan(0, (4, 4)))
    slots = [4]
    args = PlannerArgs(state_byte_price_s=1.0)
    prices = MovePrices(args, (10,) * 8, lambda: slots[0])
    forecast = StepForecast(served.plan, served.truth)
    planner = LayerPlanner(args, served.plan, forecast, prices=prices)
    core = movable_core(4, 4, planner=planner)
    core.migration.move_to((3, 5), 0.0)
    stages_get_ready(core, 0.5)
    stages_switch(core, 0.5)
    # Ready after half a second, of which stages gave a tenth; 20 bytes in 2 ms at the switch, so
    # that those of 4 slots cost 4 ms.
    assert prices.of([0]) == pytest.approx(0.052)
    slots[0] = 8
    assert prices.of([0]) == pytest.approx(0.056)
