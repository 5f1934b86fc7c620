"""Seeded traffic on pools that are always too small: retraction, eviction and waiting together."""

import random

import pytest
from support.pipelines import (
    FakePipeline,
    make_request,
    new_pipeline,
    output_when_alone,
)

from sgl_pipeline.args import ACCOUNTINGS, POLICIES, SchedulingArgs, ThrottleArgs
from sgl_pipeline.errors import RequestError
from sgl_pipeline.requests import FinishReason, Request

ABORTED = FinishReason("abort", message="the client went away")


def random_pipeline(rng: random.Random, policy: str) -> tuple[FakePipeline, int]:
    """A pipeline, and the tokens that its pool holds."""
    max_prefill_tokens = rng.choice([1, 3, 8, 64])
    throttle = ThrottleArgs(
        policy=policy,
        max_prefill_tokens=max_prefill_tokens,
        min_prefill_tokens=min(2, max_prefill_tokens),
        prefill_spread_steps=2,
    )
    args = SchedulingArgs(
        page_size=rng.choice([1, 2, 4]),
        max_running_requests=rng.choice([2, 4, 16]),
        radix_cache=rng.random() < 0.7,
        accounting=rng.choice(list(ACCOUNTINGS)),
        duplicate_prefills=rng.random() < 0.3,
        extra_steps_in_flight=rng.randint(0, 1),
        preemption_threshold=rng.choice([None, 0]),
    )
    num_pages = rng.randint(4, 14)
    return new_pipeline(
        args, throttle, num_pages=num_pages, num_stages=rng.randint(1, 4)
    ), num_pages * args.page_size


def random_request(rng: random.Random, name: str, pool_tokens: int) -> Request:
    length = rng.randint(1, pool_tokens * 2 // 3)
    return make_request(
        name,
        [rng.randint(0, 1) for _ in range(length)],
        rng.randint(0, 8),
        stop_token_ids=frozenset({0} if rng.random() < 0.3 else ()),
        priority=rng.random() < 0.2,
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(40))
def test_every_request_gets_the_tokens_that_it_gets_alone(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    pipeline, pool_tokens = random_pipeline(rng, policy)
    scheduler, added = pipeline.scheduler, []
    for _ in range(120):
        event = rng.random()
        if event < 0.3:
            request = random_request(rng, str(len(added)), pool_tokens)
            try:
                scheduler.add(request)
            except RequestError:
                needed = len(request.prompt_ids) + request.stops.max_new_tokens - 1
                assert needed > pool_tokens
            else:
                added.append(request)
        elif event < 0.6:
            pipeline.schedule()
        elif event < 0.95 and pipeline.steps_in_flight:
            pipeline.complete()
        elif scheduler.requests():
            scheduler.abort(rng.choice(scheduler.requests()).request_id, ABORTED)
        scheduler.check_invariants()
    pipeline.drain()
    load = scheduler.load()
    assert (load.free_pages, load.waiting_tokens) == (load.total_pages, 0)
    for request in added:
        expected = output_when_alone(request)
        if request.finish is ABORTED:
            expected = expected[: len(request.output_ids)]
        assert request.output_ids == expected
