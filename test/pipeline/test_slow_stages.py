"""A stage becomes slow once and recovers once, whatever the noise."""

import random

import pytest
from support.served_steps import ServedSteps, flat_costs, mixed_step

from sgl_pipeline.migration.stage_speeds import BLOCK_STEPS, NUM_BLOCKS, StageSpeeds
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.slow_stages import SETTLE_S, SETTLE_STEPS, SlowStages
from sgl_pipeline.stage_plan import StagePlan

STEP_S = 0.02


def changes(
    factors: list[tuple[float, ...]], noise: float, seed: int, step_s: float = STEP_S
) -> list[tuple[int, set[int]]]:
    """After which step which stages are slow, wherever that changes. Every step of a stage takes
    its factor, times a random number, times what is predicted."""
    rng = random.Random(seed)
    num_stages = len(factors[0])
    speeds, slow = StageSpeeds(num_stages), SlowStages(num_stages)
    found: list[tuple[int, set[int]]] = []
    for number, true in enumerate(factors):
        measured = [10.0 * factor * rng.lognormvariate(0.0, noise) for factor in true]
        speeds.note(measured, [10.0] * num_stages)
        slow.note(speeds.factors, number * step_s)
        if set(slow.since_s) != (found[-1][1] if found else set()):
            found.append((number, set(slow.since_s)))
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.05, 0.5])
def test_noise_alone_makes_no_stage_slow(noise: float, seed: int) -> None:
    assert changes([(1.0, 1.0, 1.0)] * 4000, noise, seed) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_stage_at_a_threshold_does_not_flap(seed: int) -> None:
    """Between the two thresholds it stays what it was, and on one of them it changes once."""
    assert changes([(1.0, 1.75)] * 4000, 0.15, seed) == []
    slow_then_between = [(1.0, 4.0)] * 1000 + [(1.0, 1.75)] * 4000
    assert [slow for _, slow in changes(slow_then_between, 0.15, seed)] == [{1}]


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_stage_is_told_once_and_its_recovery_once(seed: int) -> None:
    phases = [(1.0, 1.0)] * 500 + [(10.0, 1.0)] * 1000 + [(1.0, 1.0)] * 1000
    (slow_from, first), (fine_from, then) = changes(phases, 0.3, seed)
    assert (first, then) == ({0}, set())
    late = BLOCK_STEPS * NUM_BLOCKS + max(SETTLE_STEPS, SETTLE_S / STEP_S)
    assert 500 < slow_from <= 500 + late and 1500 < fine_from <= 1500 + late


def test_a_pause_of_a_stage_or_a_few_slow_steps_are_not_slowness() -> None:
    short = [(1.0, 1.0)] * 300 + [(10.0, 1.0)] * 20 + [(1.0, 1.0)] * 300
    assert changes(short, 0.05, 0) == []
    assert changes(short, 0.05, 0, step_s=1.0) == []


def test_a_host_that_slows_all_stages_makes_none_slow() -> None:
    assert changes([(1.0, 1.0)] * 300 + [(5.0, 5.0)] * 1000, 0.05, 0) == []
    slow = SlowStages(3)
    slow.note((4.0, 4.0, 12.0), 0.0)
    assert slow.slowdowns == (1.0, 1.0, 3.0)
    # One that is faster than predicted makes nobody slow.
    slow.note((0.5, 1.0, 0.5), 0.0)
    assert slow.slowdowns == (0.5, 1.0, 0.5)


def test_the_time_in_which_no_step_runs_counts_for_nothing() -> None:
    slow = SlowStages(2)
    for number in range(SETTLE_STEPS):
        slow.note((3.0, 1.0), number * 0.01)
    slow.interrupt()
    slow.note((3.0, 1.0), 100.0)
    assert slow.since_s == {}
    for number in range(SETTLE_STEPS):
        slow.note((3.0, 1.0), 100.0 + SETTLE_S + number * 0.01)
    assert slow.since_s == {0: 100.0}


def test_one_stage_alone_is_measured_against_what_is_predicted() -> None:
    found = changes([(1.0,)] * 300 + [(3.0,)] * 1000, 0.05, 0)
    assert [slow for _, slow in found] == [{0}]


def test_the_core_finds_the_stage_whose_timings_say_so() -> None:
    served = ServedSteps(flat_costs(8, 1.0), StagePlan(0, (4, 4)))
    forecast, slow = StepForecast(served.plan), SlowStages(2)
    for number in range(1200):
        served.slowness = (1.0, 3.0) if number >= 600 else (1.0, 1.0)
        forecast.note(served.run(mixed_step(20, number % 3 * 64)))
        slow.note(forecast.speeds, number * STEP_S)
        assert set(slow.since_s) <= ({1} if number >= 600 else set())
    assert slow.slowdowns[1] == pytest.approx(3.0, rel=0.1)
    assert 600 * STEP_S < slow.since_s[1] < 700 * STEP_S
