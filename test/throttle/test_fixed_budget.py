"""The two policies whose decodes and prefill share one budget."""

import pytest

from sgl_pipeline.args import ThrottleArgs
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
