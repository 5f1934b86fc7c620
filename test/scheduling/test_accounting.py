"""What a policy is told under each accounting, and that nothing but the policy is told it."""

import pytest
from support.pipelines import (
    FakePipeline,
    make_request,
    new_pipeline,
    output_when_alone,
)

from sgl_pipeline.args import ACCOUNTINGS, SchedulingArgs, ThrottleArgs
from sgl_pipeline.throttle import PipelineLoad

PREFIX = list(range(100, 190))


def pipeline_of(
    accounting: str,
    num_pages: int = 2000,
    num_stages: int = 1,
    *,
    policy: str = "throttle",
    duplicate_prefills: bool = False,
) -> FakePipeline:
    """Pages of one token."""
    args = SchedulingArgs(
        page_size=1,
        accounting=accounting,
        duplicate_prefills=duplicate_prefills,
        preemption_threshold=0,
    )
    throttle = ThrottleArgs(policy=policy, min_prefill_tokens=1, max_prefill_tokens=2048)
    return new_pipeline(
        args, throttle, num_pages=num_pages, num_stages=num_stages, context_length=5000
    )


def load_of_next_step(pipeline: FakePipeline) -> PipelineLoad:
    """Starts a step; returns what it was decided from."""
    microbatch = pipeline.schedule()
    assert microbatch is not None
    return microbatch.load


@pytest.mark.parametrize(
    ("accounting", "cold_tokens", "warm_tokens"),
    [
        # Ten requests of 90 shared and 10 own tokens.
        ("radix", 90 + 10 * 10, 10 * 10),
        ("radix-free-list", 90 + 10 * 10, 10 * 10),
        ("radix-unshared", 10 * 100, 10 * 10),
        ("gllm", 10 * 100, 10 * 100),
        ("naive", 10 * 100, 10 * 100),
    ],
)
def test_waiting_tokens_by_hand(accounting: str, cold_tokens: int, warm_tokens: int) -> None:
    for is_warm, tokens in ((False, cold_tokens), (True, warm_tokens)):
        pipeline = pipeline_of(accounting)
        if is_warm:
            pipeline.scheduler.add(make_request("first", [*PREFIX, 0], 0))
            pipeline.drain()
        for number in range(10):
            own = [200 + 10 * number + position for position in range(10)]
            pipeline.scheduler.add(make_request(str(number), PREFIX + own, 1))
        load = load_of_next_step(pipeline)
        assert (load.waiting_tokens, load.prompts) == (tokens, 10)


def test_a_prompt_counts_whole_until_it_is_admitted_and_by_its_rest_afterwards() -> None:
    pipeline = pipeline_of("gllm")
    pipeline.scheduler.add(make_request("first", [*PREFIX, 0], 0))
    pipeline.drain()
    pipeline.scheduler.add(make_request("r", [*PREFIX, *range(500, 610)], 1))
    assert load_of_next_step(pipeline).waiting_tokens == 200
    # 90 tokens were a hit and 200 / 8 are in flight.
    assert pipeline.scheduler.load(ACCOUNTINGS["gllm"]).waiting_tokens == 200 - 90 - 25


@pytest.mark.parametrize("policy", ["throttle", "throttle-adaptive", "no-ut"])
def test_a_free_list_without_its_cached_pages_pauses_prefill_but_never_for_ever(
    policy: str,
) -> None:
    """The cache fills every idle page; only what the radix tree knows tells that they are idle."""
    naive, exact = (pipeline_of(name, num_pages=100, policy=policy) for name in ("naive", "radix"))
    free_pages = []
    for pipeline in (naive, exact):
        pipeline.scheduler.add(make_request("first", list(range(99)), 2))
        pipeline.drain()
        pipeline.scheduler.add(make_request("second", [200] * 20, 30))
        pipeline.scheduler.add(make_request("third", [300] * 20, 2))
        free_pages.append(load_of_next_step(pipeline).free_pages)
    assert free_pages == [0, 100]
    assert naive.scheduler.load().free_pages == exact.scheduler.load().free_pages
    for pipeline in (naive, exact):
        pipeline.drain()
    ends = []
    for pipeline in (naive, exact):
        steps = [
            microbatch.step_id
            for microbatch in pipeline.microbatches
            for chunk in microbatch.chunks
            if chunk.request.request_id == "third" and not chunk.is_decode
        ]
        ends.append(steps[-1])
    assert ends[1] < ends[0]


@pytest.mark.parametrize("duplicate_prefills", [False, True])
def test_a_shared_prefix_is_computed_once_unless_told_otherwise(duplicate_prefills: bool) -> None:
    pipeline = pipeline_of("gllm", policy="no-wt", duplicate_prefills=duplicate_prefills)
    requests = [make_request(str(number), [*PREFIX, number], 3) for number in range(3)]
    for request in requests:
        pipeline.scheduler.add(request)
    pipeline.drain()
    prefilled = sum(microbatch.num_prefill_tokens for microbatch in pipeline.microbatches)
    assert prefilled == (3 * 91 if duplicate_prefills else 90 + 3)
    for request in requests:
        assert request.output_ids == output_when_alone(request)
    load = pipeline.scheduler.load()
    assert load.free_pages == load.total_pages


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
def test_priorities_are_served_alike_under_every_accounting(accounting: str) -> None:
    pipeline = pipeline_of(accounting, num_pages=60)
    pipeline.scheduler.add(make_request("low", [1] * 30, 20))
    pipeline.schedule()
    pipeline.complete()
    pipeline.scheduler.add(make_request("middle", [2] * 40, 1, priority=1))
    pipeline.scheduler.add(make_request("high", [3] * 40, 1, priority=2))
    events = pipeline.drain()
    ends = [event.request.request_id for event in events if event.finish is not None]
    assert ends == ["high", "middle", "low"]
