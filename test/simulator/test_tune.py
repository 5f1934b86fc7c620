"""Budget search against capacities that are known, and its parameters against the policies."""

import math
from dataclasses import replace
from itertools import product

import pytest

from sgl_pipeline.args import POLICIES, ThrottleArgs
from sgl_pipeline.simulator.propose import VALUES
from sgl_pipeline.simulator.tune import FLAGS, RATE_TOLERANCE, capacity, search
from sgl_pipeline.throttle import POLICY_TABLE, PipelineLoad, make_policy
from test.throttle.test_time_throttle import Times


def knows(limit_of: dict[int, float]):
    """Attainment that drops at a limit set by the budget."""
    return lambda throttle, rate: float(rate <= limit_of.get(throttle.max_prefill_tokens, 1.0))


@pytest.mark.parametrize("limit", [0.05, 0.7, 3.0, 500.0])
@pytest.mark.parametrize("guess", [0.1, 1.0, 64.0])
def test_capacity_is_found_from_any_guess(limit: float, guess: float) -> None:
    found = capacity(
        lambda throttle, rate: float(rate <= limit), ThrottleArgs(policy="throttle"), 0.9, guess
    )
    assert limit / (1 + RATE_TOLERANCE) <= found <= limit


def test_a_target_that_a_burst_meets_has_no_limit() -> None:
    assert capacity(lambda throttle, rate: 1.0, ThrottleArgs(policy="throttle"), 0.9) == math.inf


def test_a_target_that_any_rate_meets_has_no_limit_though_a_burst_misses_it() -> None:
    args = ThrottleArgs(policy="throttle")
    assert capacity(lambda throttle, rate: float(rate < math.inf), args, 0.9) == math.inf


def test_what_carries_nothing_has_no_capacity() -> None:
    assert capacity(lambda throttle, rate: 0.0, ThrottleArgs(policy="throttle"), 0.9) == 0.0


def test_the_best_budget_is_among_the_trials() -> None:
    start = ThrottleArgs(policy="sarathi")
    trials = list(search(start, knows({512: 4.0, 1024: 8.0, 2048: 6.0}), 0.9))
    best = max(trials, key=lambda trial: trial.score)
    assert best.throttle.max_prefill_tokens == 1024
    assert best.score == pytest.approx(8.0, rel=RATE_TOLERANCE)


def test_parameters_are_searched_one_after_the_other() -> None:
    def attainment(throttle: ThrottleArgs, rate: float) -> float:
        limit = 10.0 - abs(throttle.prefill_spread_steps - 4) - 50 * throttle.pause_free_share
        return float(rate <= limit)

    best = max(
        search(ThrottleArgs(policy="throttle"), attainment, 1.0), key=lambda trial: trial.score
    ).throttle
    assert (best.prefill_spread_steps, best.pause_free_share) == (4, 0.0)


def test_every_searched_parameter_has_a_flag_and_values_for_a_running_server() -> None:
    searched = {name for entry in POLICY_TABLE.values() for name in entry.searched}
    assert searched == set(VALUES) <= set(FLAGS)


UNTIMED = [
    PipelineLoad(
        step_id=1,
        pipeline_depth=4,
        waiting_tokens=waiting,
        prompts=2,
        running_decodes=20,
        ready_decodes=5,
        decode_attended_tokens=4000,
        free_pages=free,
        reserved_pages=20,
        total_pages=1000,
        steps_in_flight=3,
    )
    for waiting, free in product((0, 400, 3000, 10**6), (0, 30, 70, 500, 1000))
]
LOADS = [*UNTIMED, *(replace(one, step_times=Times()) for one in UNTIMED)]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_search_varies_what_a_policy_reads_and_nothing_else(policy: str) -> None:
    def budgets(throttle: ThrottleArgs) -> list[object]:
        return [make_policy(throttle)(load) for load in LOADS]

    start = ThrottleArgs(policy=policy)
    tried = {
        (name, value)
        for entry in POLICY_TABLE.values()
        for name, values in entry.searched.items()
        for value in values
    }
    read = {
        name for name, value in tried if budgets(replace(start, **{name: value})) != budgets(start)
    }
    assert set(POLICY_TABLE[policy].searched) == read
