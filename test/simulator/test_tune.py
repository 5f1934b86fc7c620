"""Budget search against capacities that are known, and its flags against the server's parser."""

import math

import pytest

from sgl_pipeline.args import POLICIES, ThrottleArgs
from sgl_pipeline.simulator.tune import FLAGS, RATE_TOLERANCE, SEARCH_SPACE, capacity, search


def knows(limit_of: dict[int, float]):
    """Attainment that drops at a limit set by the budget."""
    return lambda throttle, rate: float(rate <= limit_of.get(throttle.max_prefill_tokens, 1.0))


@pytest.mark.parametrize("limit", [0.05, 0.7, 3.0, 500.0])
@pytest.mark.parametrize("guess", [0.1, 1.0, 64.0])
def test_capacity_is_found_from_any_guess(limit: float, guess: float) -> None:
    found = capacity(lambda throttle, rate: float(rate <= limit), ThrottleArgs(), 0.9, guess)
    assert limit / (1 + RATE_TOLERANCE) <= found <= limit


def test_a_target_that_a_burst_meets_has_no_limit() -> None:
    assert capacity(lambda throttle, rate: 1.0, ThrottleArgs(), 0.9) == math.inf


def test_what_carries_nothing_has_no_capacity() -> None:
    assert capacity(lambda throttle, rate: 0.0, ThrottleArgs(), 0.9) == 0.0


def test_the_best_budget_is_among_the_trials() -> None:
    start = ThrottleArgs(policy="sarathi")
    trials = list(search(start, knows({512: 4.0, 1024: 8.0, 2048: 6.0}), 0.9))
    best = max(trials, key=lambda trial: trial.rate_per_s)
    assert best.throttle.max_prefill_tokens == 1024
    assert best.rate_per_s == pytest.approx(8.0, rel=RATE_TOLERANCE)


def test_parameters_are_searched_one_after_the_other() -> None:
    def attainment(throttle: ThrottleArgs, rate: float) -> float:
        limit = 10.0 - abs(throttle.prefill_spread_steps - 4) - 50 * throttle.pause_free_share
        return float(rate <= limit)

    best = max(search(ThrottleArgs(), attainment, 1.0), key=lambda trial: trial.rate_per_s).throttle
    assert (best.prefill_spread_steps, best.pause_free_share) == (4, 0.0)


def test_every_policy_that_can_be_tuned_is_a_policy_of_the_server() -> None:
    assert set(SEARCH_SPACE) <= set(POLICIES)
    assert {name for space in SEARCH_SPACE.values() for name in space} <= set(FLAGS)
