"""The two policies whose decodes and prefill share one budget, and the choice of a policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.args import POLICIES, ThrottleArgs
from sgl_pipeline.throttle import PipelineLoad, TokenBudget, make_policy


def budget(policy: str, ready_decodes: int, max_prefill_tokens: int = 512) -> TokenBudget:
    args = ThrottleArgs(policy=policy, max_prefill_tokens=max_prefill_tokens, min_prefill_tokens=1)
    return make_policy(args)(
        PipelineLoad(
            step_id=3,
            pipeline_depth=4,
            waiting_tokens=5000,
            prompts=3,
            running_decodes=ready_decodes + 7,
            ready_decodes=ready_decodes,
            free_pages=10,
            reserved_pages=5,
            total_pages=1000,
            steps_in_flight=3,
        )
    )


@pytest.mark.parametrize("policy", ["sarathi", "greedy-queue"])
def test_decodes_come_first_and_prefill_gets_the_rest(policy: str) -> None:
    assert budget(policy, ready_decodes=100) == TokenBudget(412, 100, "MaxP")


def test_sarathi_takes_every_ready_decode_whatever_the_budget() -> None:
    assert budget("sarathi", ready_decodes=600) == TokenBudget(0, 600, "MaxP")


def test_the_greedy_queue_never_exceeds_its_budget() -> None:
    assert budget("greedy-queue", ready_decodes=600) == TokenBudget(0, 512, "MaxP")


@given(
    policy=st.sampled_from(POLICIES),
    depth=st.integers(1, 9),
    waiting=st.integers(0, 10**7),
    prompts=st.integers(0, 3),
    ready=st.integers(0, 300),
    flying=st.integers(0, 300),
    free=st.integers(0, 1000),
    reserved=st.integers(0, 3000),
    steps=st.tuples(st.integers(0, 100), st.integers(0, 9)),
)
def test_every_policy_stays_within_its_bounds_and_never_stalls(
    policy: str,
    depth: int,
    waiting: int,
    prompts: int,
    ready: int,
    flying: int,
    free: int,
    reserved: int,
    steps: tuple[int, int],
) -> None:
    args = ThrottleArgs(policy=policy)
    load = PipelineLoad(
        step_id=steps[0],
        pipeline_depth=depth,
        waiting_tokens=waiting,
        prompts=prompts,
        running_decodes=ready + flying,
        ready_decodes=ready,
        free_pages=free,
        reserved_pages=reserved,
        total_pages=1000,
        steps_in_flight=steps[1],
    )
    answer = make_policy(args)(load)
    assert answer == make_policy(args)(load)
    assert 0 <= answer.prefill_tokens <= args.prefill_limit
    assert 0 <= answer.decodes <= ready
    assert answer.decodes > 0 or ready == 0
    if not load.running_decodes and not load.steps_in_flight:
        assert answer.prefill_tokens > 0
