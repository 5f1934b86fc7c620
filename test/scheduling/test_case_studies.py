"""gLLM's case studies as golden runs: the whole scheduler on four stages, step by step."""

import pytest
from support.pipelines import FakePipeline, make_request, new_pipeline

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs

STAGES = 4
THROTTLES = ("throttle", "throttle-adaptive", "no-wt", "no-ut", "no-threshold")


def pipeline_of(throttle: ThrottleArgs, num_pages: int, page_size: int = 1) -> FakePipeline:
    return new_pipeline(
        SchedulingArgs(page_size=page_size),
        throttle,
        num_pages=num_pages,
        num_stages=STAGES,
        context_length=10_000,
    )


def test_a_burst_after_a_lull_is_spread_over_the_steps() -> None:
    """Nothing waits, then a burst arrives; T = 3: each step takes a third of what is left."""
    pipeline = pipeline_of(ThrottleArgs(prefill_spread_steps=3), 100_000, page_size=16)
    for number in range(12):
        pipeline.scheduler.add(make_request(str(number), [number] * 250, 1))
    pipeline.drain()
    tokens = [microbatch.num_prefill_tokens for microbatch in pipeline.microbatches]
    assert sum(tokens) == 3000
    assert tokens[:5] == [1000, 667, 445, 296, 198]


def test_a_fixed_budget_takes_the_same_burst_in_peaks() -> None:
    args = ThrottleArgs(policy="sarathi", prefill_spread_steps=3)
    pipeline = pipeline_of(args, 100_000, page_size=16)
    for number in range(12):
        pipeline.scheduler.add(make_request(str(number), [number] * 250, 1))
    pipeline.drain()
    tokens = [microbatch.num_prefill_tokens for microbatch in pipeline.microbatches]
    assert tokens == [2048, 952]


@pytest.mark.parametrize(
    ("policy", "prefill_tokens"),
    [
        ("throttle", [64, 56, 45, 38, 33, 27, 23, 19, 16, 14, 11, 9, 8, 6, 5, 3, 3, 2, 1, 1, 1, 0]),
        ("no-ut", [64, 64, 64, 64, 64, 64, 66, 0]),
        ("throttle-adaptive", [64, 57, 51, 45, 39, 32, 26, 19, 15, 10, 6, 1, 1, 1, 0]),
    ],
)
def test_prefill_fades_out_as_the_kv_pages_run_low(policy: str, prefill_tokens: list[int]) -> None:
    """Sixfold more work than pages. Without the memory term prefill stops dead instead."""
    throttle = ThrottleArgs(
        policy=policy, max_prefill_tokens=64, min_prefill_tokens=1, pause_free_share=0.3
    )
    pipeline = pipeline_of(throttle, num_pages=600)
    for number in range(60):
        pipeline.scheduler.add(make_request(str(number), [number] * 30, 30))
    pipeline.drain()
    tokens = [microbatch.num_prefill_tokens for microbatch in pipeline.microbatches]
    assert tokens[: len(prefill_tokens)] == prefill_tokens


def decodes_after_a_burst(policy: str) -> list[int]:
    """26 prompts at once, long since decoding: the decodes of eight steps in a row."""
    pipeline = pipeline_of(ThrottleArgs(policy=policy), 4000, page_size=16)
    for number in range(26):
        length = 40 if number < 12 else 400
        pipeline.scheduler.add(make_request(str(number), [number] * length, 200))
    while len(pipeline.microbatches) < 88:
        pipeline.fill()
        pipeline.complete()
    return [microbatch.num_decodes for microbatch in pipeline.microbatches[80:88]]


@pytest.mark.parametrize("policy", THROTTLES)
def test_26_decodes_after_a_burst_run_7_7_6_6(policy: str) -> None:
    assert decodes_after_a_burst(policy) == [7, 7, 6, 6, 7, 7, 6, 6]


@pytest.mark.parametrize("policy", ["sarathi", "greedy-queue"])
def test_unbalanced_policies_keep_the_shape_of_the_burst_for_ever(policy: str) -> None:
    """The baselines' flaw (vLLM ran 4, 4, 4, 14): cohorts never mix."""
    decodes = decodes_after_a_burst(policy)
    assert sorted(set(decodes)) == [5, 6, 15]
