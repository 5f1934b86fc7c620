"""When the planner keeps still: under noise, at boundaries, after a single disturbed step. And what
it learns of the stages' speeds."""

import random

import pytest
from support.planners import (
    EAGER,
    first_split,
    noise_of,
    note,
    planner_of,
    proposals,
    random_works,
)
from support.served_steps import (
    ServedSteps,
    card_costs,
    decode_step,
    flat_costs,
    mixed_step,
)

from benchmark.forecasts.predictor_error import made_up_record
from sgl_pipeline.migration.planner_args import PlannerArgs
from sgl_pipeline.stage_plan import StagePlan

# Moves as cheap as on one host: what restrains is not their price.
CHEAP = PlannerArgs(layer_price_s=0.01)


@pytest.mark.parametrize(
    ("num_layers", "seed", "knows_costs"),
    [
        (num_layers, seed, (place + seed) % 2 == 0)
        for place, num_layers in enumerate((16, 48, 64))
        for seed in range(3)
    ],
)
def test_noise_moves_nothing_in_ten_thousand_steps(
    num_layers: int, seed: int, knows_costs: bool
) -> None:
    """From the best split, with 10 % of noise on each stage's time."""
    costs, works = card_costs(num_layers), random_works(seed, 10_000)
    split = first_split(costs, (num_layers // 4,) * 4, mixed_step(40, 80))
    served = ServedSteps(costs, StagePlan(0, split), noise=noise_of(seed, 0.1))
    planner = planner_of(served, CHEAP, knows_costs=knows_costs)
    assert not proposals(planner, served, works)
    assert planner.forecast.predictor is not None


@pytest.mark.parametrize("seed", range(3))
def test_work_between_two_splits_does_not_make_it_flap(seed: int) -> None:
    """The tail swings around the point where a layer more or less on the last stage is as good."""
    rng = random.Random(seed)
    served = ServedSteps(card_costs(16), StagePlan(0, (5, 4, 4, 3)), noise=noise_of(seed, 0.1))
    planner = planner_of(served, CHEAP)
    moves = 0
    for _ in range(10_000):
        note(planner, served.run(decode_step(rng.randint(1, 220))))
        found = planner.proposal(served.plan.layer_counts)
        if found is not None:
            moves += 1
            served.plan = StagePlan(moves, found.layer_counts)
            planner.forecast.know_plan(served.plan)
            planner.moved()
    assert moves <= 2


@pytest.mark.parametrize("slow_stage", range(4))
@pytest.mark.parametrize("knows_costs", [True, False])
def test_a_stage_that_gets_slower_is_relieved(slow_stage: int, knows_costs: bool) -> None:
    costs = card_costs(48)
    split = first_split(costs, (12, 12, 12, 12), decode_step(40))
    served = ServedSteps(costs, StagePlan(0, split), noise=noise_of(1, 0.1))
    planner = planner_of(served, CHEAP, knows_costs=knows_costs)
    assert not proposals(planner, served, random_works(2, 400))
    served.slowness = tuple(1.3 if stage == slow_stage else 1.0 for stage in range(4))
    found = proposals(planner, served, random_works(3, 150))
    assert found
    _, proposal = found[-1]
    assert proposal.layer_counts[slow_stage] < split[slow_stage]
    assert found[0][0] <= 120
    assert planner.forecast.speeds[slow_stage] > 1.2
    # True also of the stages as they are.
    real = [
        max(
            served.truth.stage_times_ms(
                served.truth.parts_ms(mixed_step(40, 80)), counts, served.slowness
            )
        )
        for counts in (split, proposal.layer_counts)
    ]
    assert real[1] < 0.95 * real[0]


def test_stages_that_differ_by_little_are_taken_for_equal() -> None:
    served = ServedSteps(flat_costs(64, 0.0), StagePlan(0, (16, 16, 16, 16)), (1.0, 1.04, 1.0, 1.0))
    planner = planner_of(served)
    assert not proposals(planner, served, [decode_step(4)] * 200)
    assert len(set(planner.forecast.speeds)) == 1


def test_a_single_disturbed_step_does_nothing() -> None:
    served = ServedSteps(flat_costs(16, tail_ms=0.0), StagePlan(0, (4, 4, 4, 4)))
    planner = planner_of(served)
    proposals(planner, served, [decode_step(4)] * 100)
    before = planner.forecast.speeds
    note(planner, made_up_record(decode_step(4), (4.0, 4000.0, 4.0, 4.0)))
    assert not proposals(planner, served, [decode_step(4)] * 100)
    assert planner.forecast.speeds == pytest.approx(before)


def test_timings_that_are_no_computing_teach_nothing() -> None:
    served = ServedSteps(flat_costs(16, 0.0), StagePlan(0, (4, 4, 4, 4)), (1.0, 3.0, 1.0, 1.0))
    planner = planner_of(served, EAGER, learns=False)
    assert not proposals(planner, served, [decode_step(4)] * 200)
    assert planner.forecast.speeds == (1.0,) * 4


def test_a_step_of_an_older_plan_is_measured_by_that_plan() -> None:
    """Steps of epoch 0 come back after the switch: their stages had other layers."""
    served = ServedSteps(flat_costs(16, 0.0), StagePlan(0, (2, 6, 4, 4)))
    planner = planner_of(served)
    planner.forecast.know_plan(StagePlan(1, (4, 4, 4, 4)))
    proposals(planner, served, [decode_step(4)] * 100)
    assert planner.forecast.speeds == pytest.approx((1.0,) * 4)
    served.plan = StagePlan(9, (8, 4, 2, 2))  # a plan that nobody named
    proposals(planner, served, [decode_step(4)] * 100)
    assert planner.forecast.speeds == pytest.approx((1.0,) * 4)
