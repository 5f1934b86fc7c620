"""Steps that a newcomer can wait for: how long they are, and what that may cost."""

from dataclasses import replace

import pytest

from sgl_pipeline.migration.online_fit import FIRST_FIT_STEPS
from sgl_pipeline.pipeline_load import PipelineLoad, TimeLimit, TokenBudget
from sgl_pipeline.scheduling.short_steps import (
    LEAST_STEPS,
    ShortSteps,
    first_steps_tokens,
    shortest_ms,
)
from sgl_pipeline.step_work import StepWork

FIXED_MS, TOKEN_MS = 5.0, 0.03
BUDGET = TokenBudget(2000, 0, "MaxP")
WHOLE_MS = FIXED_MS + 2000 * TOKEN_MS


class Times:
    """A fixed time, and as much for each token."""

    def step_ms(self, work: StepWork) -> float:
        return FIXED_MS + TOKEN_MS * work.tokens


TIMES = Times()


def load(times: Times | None = TIMES) -> PipelineLoad:
    """A queue that no step empties, and no decodes."""
    return PipelineLoad(
        step_id=0,
        pipeline_depth=4,
        waiting_tokens=100_000,
        prompts=10,
        running_decodes=0,
        ready_decodes=0,
        free_pages=1000,
        reserved_pages=0,
        total_pages=1000,
        steps_in_flight=4,
        step_times=times,
    )


def settled_ms(steps: ShortSteps, decode_steps: int, budget: TokenBudget = BUDGET) -> float:
    """The bound after many steps that are full of prefill, each after so many decodes alone."""
    bound_ms = 0.0
    for _ in range(8000):
        limit = steps.bounded(budget, load(), is_shared=False).time
        assert limit is not None
        bound_ms = limit.step_ms
        for _ in range(decode_steps):
            steps.note(StepWork(1, 1, 0, 0, 1), TIMES)
        steps.note(StepWork(int((bound_ms - FIXED_MS) / TOKEN_MS), 0, 0, 0, 1), TIMES)
    return bound_ms


@pytest.mark.parametrize("cost_share", [0.03, 0.1])
def test_prompts_that_fill_every_step_cost_no_more_than_is_allowed(cost_share: float) -> None:
    bound_ms = settled_ms(ShortSteps(cost_share), 0)
    tokens = (bound_ms - FIXED_MS) / TOKEN_MS
    cost = (bound_ms / tokens) / (WHOLE_MS / 2000) - 1.0
    assert cost_share / 2 < cost <= cost_share
    assert bound_ms < WHOLE_MS


@pytest.mark.parametrize("policy_ms", [WHOLE_MS * 0.9, WHOLE_MS])
def test_what_may_cost_bounds_the_time_limit_of_a_policy_too(policy_ms: float) -> None:
    """From the first step on, which is full."""
    limit = TimeLimit(policy_ms, 1, TIMES)
    budget = TokenBudget(2000, 0, "MaxP", limit)
    steps = ShortSteps(0.03)
    for _ in range(100):
        steps.note(StepWork(int((policy_ms - FIXED_MS) / TOKEN_MS), 0, 0, 0, 1), TIMES)
    bounded = steps.bounded(budget, load(), is_shared=False).time
    assert bounded is not None
    assert bounded.step_ms == pytest.approx(settled_ms(ShortSteps(0.03), 0))


@pytest.mark.parametrize(
    "limit", [None, TimeLimit(WHOLE_MS, 32, TIMES)], ids=["by tokens", "by time"]
)
def test_a_step_that_is_made_shorter_is_bound_by_that(limit: TimeLimit | None) -> None:
    bounded = ShortSteps(0.03).bounded(TokenBudget(2000, 0, "MaxP", limit), load(), is_shared=False)
    assert bounded.time is not None and bounded.time.step_ms < WHOLE_MS
    assert bounded.bound_by == "fair-step"


@pytest.mark.parametrize(
    "limit", [None, TimeLimit(WHOLE_MS, 32, TIMES)], ids=["by tokens", "by time"]
)
def test_a_step_that_is_short_by_its_tokens_keeps_the_word_of_the_policy(
    limit: TimeLimit | None,
) -> None:
    bounded = ShortSteps(0.03).bounded(TokenBudget(100, 0, "WT", limit), load(), is_shared=False)
    assert bounded.time is not None and bounded.time.step_ms < WHOLE_MS
    assert bounded.bound_by == "WT"


def test_a_limit_that_is_shorter_stays() -> None:
    budget = TokenBudget(2000, 0, "MaxP", TimeLimit(1.5 * FIXED_MS, 1, TIMES))
    assert ShortSteps(0.03).bounded(budget, load(), is_shared=False) is budget


def test_steps_between_which_others_are_short_are_shorter() -> None:
    full_ms, mixed_ms = (settled_ms(ShortSteps(0.03), number) for number in (0, 3))
    assert mixed_ms < 0.5 * full_ms
    assert mixed_ms >= LEAST_STEPS * TIMES.step_ms(StepWork(1, 0, 0, 0, 1))


def test_decodes_leave_room_for_prefill() -> None:
    steps = ShortSteps(0.03)
    crowd = StepWork(1000, 1000, 0, 0, 1000)
    budget = TokenBudget(2000, 1000, "MaxP")
    limit = steps.bounded(budget, load(), is_shared=False).time
    assert limit is not None and limit.step_ms > TIMES.step_ms(crowd)


@pytest.mark.parametrize("times", [None, TIMES], ids=["unknown", "known"])
def test_nothing_changes_where_nothing_may_cost(times: Times | None) -> None:
    assert ShortSteps(0.0).bounded(BUDGET, load(times), is_shared=True) is BUDGET


def first_step(step_id: int, budget: TokenBudget = BUDGET, waiting: int = 100_000) -> TokenBudget:
    """The bounded budget of that step of a server that several tenants share, without times."""
    cold = replace(load(times=None), step_id=step_id, waiting_tokens=waiting)
    return ShortSteps(0.03).bounded(budget, cold, is_shared=True)


def test_without_times_nothing_changes_where_one_tenant_has_come() -> None:
    cold = load(times=None)
    assert ShortSteps(0.03).bounded(BUDGET, cold, is_shared=False) is BUDGET


def test_the_first_steps_without_times_grow_from_short_ones_until_times_are_learned() -> None:
    steps = [first_step(step_id) for step_id in range(FIRST_FIT_STEPS)]
    lengths = [one.prefill_tokens for one in steps]
    assert lengths == sorted(set(lengths)), "a fit needs steps that differ"
    assert lengths[0] <= BUDGET.prefill_tokens / 16
    assert lengths[-1] < BUDGET.prefill_tokens / 7
    assert {one.bound_by for one in steps} == {"fair-step"}
    assert all(one.time is None for one in steps)


def test_where_times_are_never_known_the_policy_decides_in_the_end() -> None:
    assert first_step(5 * FIRST_FIT_STEPS) is BUDGET
    assert first_step(10**9) is BUDGET


def test_first_steps_that_no_bound_shortens_keep_the_word_of_the_policy() -> None:
    tokens = first_steps_tokens(0)
    within = TokenBudget(tokens, 0, "WT")
    assert first_step(0, within) is within
    pause = TokenBudget(0, 3, "pause")
    assert first_step(0, pause) is pause
    few = first_step(0, waiting=tokens)
    assert (few.prefill_tokens, few.bound_by) == (tokens, "MaxP")
    assert first_step(0, waiting=tokens + 1).bound_by == "fair-step"


def test_a_policy_that_limits_time_keeps_a_shorter_limit() -> None:
    shorter = TokenBudget(2000, 0, "TPOT", TimeLimit(6.0, 32, TIMES))
    assert ShortSteps(0.03).bounded(shorter, load(), is_shared=False) is shorter


def test_the_smallest_step_is_cheap_enough_and_no_larger_than_that() -> None:
    whole = StepWork(2048, 0, 0, 0, 0)
    whole_ms = TIMES.step_ms(whole)
    step_ms = shortest_ms(whole, TIMES, 0.03)
    cost = step_ms / ((step_ms - FIXED_MS) / TOKEN_MS) / (whole_ms / 2048)
    assert 1.02 < cost <= 1.03


@pytest.mark.parametrize("policy_ms", [None, WHOLE_MS, 1.1 * FIXED_MS * LEAST_STEPS])
def test_the_prompt_of_a_newcomer_may_stretch_a_step_but_not_beyond_the_policy(
    policy_ms: float | None,
) -> None:
    limit = None if policy_ms is None else TimeLimit(policy_ms, 32, TIMES)
    bounded = (
        ShortSteps(0.03).bounded(TokenBudget(2000, 0, "MaxP", limit), load(), is_shared=False).time
    )
    assert bounded is not None
    stretched_ms = bounded.step_ms * 1.25  # by one of the four steps in flight
    assert bounded.newcomer_ms == min(stretched_ms, policy_ms or stretched_ms)
