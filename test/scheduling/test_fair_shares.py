"""What tenants get of a scheduler: bounded lag, nobody starves, nobody alone is limited.

VTC's theorem: two tenants that are backlogged differ in service by weight by no more than what the
requests that may run at once can take, and a burst. Here both begin with the same burst left, and
the rest is `slots` requests of the largest cost.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipelines import (
    FakePipeline,
    make_request,
    new_pipeline,
    new_scheduler,
    output_when_alone,
)
from support.saved_costs import flat

from sgl_pipeline.args import POLICIES, SchedulingArgs, ThrottleArgs
from sgl_pipeline.costs.step_costs import LayerCost, RowCost, StepCosts
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.requests import Request, RequestState
from sgl_pipeline.scheduling.step_service import service_of

WEIGHTS = {"a": 1.0, "b": 3.0}
LONGEST_PROMPT, LONGEST_OUTPUT = 12, 6


def pipeline_of(
    *,
    by: str | None = "user",
    weights: str | None = None,
    slots: int = 8,
    num_pages: int = 1000,
    num_stages: int = 2,
    policy: str = "sarathi",
    step_tokens: int = 16,
    **options: bool,
) -> FakePipeline:
    """Pages of one token."""
    args = SchedulingArgs(
        page_size=1,
        max_running_requests=slots,
        fair_shares_by=by,
        tenant_weights=weights,
        **options,  # type: ignore[arg-type]
    )
    throttle = ThrottleArgs(policy=policy, max_prefill_tokens=step_tokens, min_prefill_tokens=1)
    return new_pipeline(args, throttle, num_pages=num_pages, num_stages=num_stages)


def add(
    pipeline: FakePipeline, name: str, length: int, outputs: int, tenant: str, priority: int = 0
) -> Request:
    """A request whose prompt no other one shares."""
    prompt = [crc32(f"{name} {place}".encode()) % 50 for place in range(length)]
    request = make_request(name, prompt, outputs, tenant=tenant, priority=priority)
    pipeline.scheduler.add(request)
    return request


def served(steps: list[Microbatch], start: int = 0) -> dict[str, float]:
    """The service of each tenant in the steps from `start` on, in weighted tokens."""
    sums: dict[str, float] = defaultdict(float)
    for step in steps[start:]:
        for tenant, service in service_of(step.chunks, step.work, None).items():
            sums[tenant] += service
    return sums


def waiting_tenants(pipeline: FakePipeline) -> set[str]:
    requests = pipeline.scheduler.requests()
    return {one.tenant for one in requests if one.state is RequestState.WAITING}


def run(pipeline: FakePipeline) -> Iterator[None]:
    """Serves all, step by step."""
    while not pipeline.scheduler.is_idle:
        pipeline.fill()
        yield
        pipeline.complete()
        pipeline.scheduler.check_invariants()


@settings(deadline=None)
@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(1, LONGEST_PROMPT),
            st.integers(1, LONGEST_OUTPUT),
        ),
        min_size=20,
        max_size=60,
    ),
    slots=st.integers(1, 8),
    num_pages=st.integers(LONGEST_PROMPT + LONGEST_OUTPUT, 120),
    num_stages=st.integers(1, 3),
    policy=st.sampled_from(POLICIES),
    step_tokens=st.sampled_from([1, 5, 16, 64]),
)
def test_tenants_that_wait_are_never_far_apart(
    shapes: list[tuple[str, int, int]],
    slots: int,
    num_pages: int,
    num_stages: int,
    policy: str,
    step_tokens: int,
) -> None:
    pipeline = pipeline_of(
        weights='{"b": 3}',
        slots=slots,
        num_pages=num_pages,
        num_stages=num_stages,
        policy=policy,
        step_tokens=step_tokens,
        duplicate_prefills=True,  # who waits for another's prefix is not backlogged
    )
    for number, (tenant, length, outputs) in enumerate(shapes):
        add(pipeline, str(number), length, outputs, tenant)
    # A prompt, with all output again after a retraction, and its output; and the step under way.
    most = (slots + 1) * (LONGEST_PROMPT + LONGEST_OUTPUT + 2 * LONGEST_OUTPUT) + step_tokens + 16
    had: dict[str, float] = defaultdict(float)
    num_counted = 0
    for _ in run(pipeline):
        if waiting_tenants(pipeline) != {"a", "b"}:
            break
        for tenant, service in served(pipeline.microbatches, num_counted).items():
            had[tenant] += service
        num_counted = len(pipeline.microbatches)
        by_weight = {name: had[name] / weight for name, weight in WEIGHTS.items()}
        assert abs(by_weight["a"] - by_weight["b"]) <= most
    pipeline.drain()
    for request in pipeline.scheduler.requests():
        assert request.output_ids == output_when_alone(request)


def test_weights_of_one_to_three_give_one_to_three() -> None:
    pipeline = pipeline_of(weights='{"b": 3}')
    for number in range(400):
        add(pipeline, f"a{number}", 10, 5, "a")
        add(pipeline, f"b{number}", 4 + number % 9, 3, "b")
    for _ in run(pipeline):
        if waiting_tenants(pipeline) != {"a", "b"}:
            break
    sums = served(pipeline.microbatches)
    assert sum(sums.values()) > 4000
    assert sums["b"] / sums["a"] == pytest.approx(3.0, rel=0.05)


@settings(deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 30), st.integers(0, 9), st.integers(0, 1)), max_size=14
    ),
    slots=st.integers(1, 6),
    num_pages=st.integers(40, 90),
    policy=st.sampled_from(POLICIES),
)
def test_one_tenant_alone_is_served_as_without_shares(
    shapes: list[tuple[int, int, int]], slots: int, num_pages: int, policy: str
) -> None:
    """Work-conserving, step by step: nobody alone is limited, also in too few pages."""

    def steps(by: str | None) -> list[list[tuple[str, int, int]]]:
        pipeline = pipeline_of(by=by, slots=slots, num_pages=num_pages, policy=policy)
        for number, (length, outputs, priority) in enumerate(shapes):
            add(pipeline, str(number), length, outputs, "a", priority)
        pipeline.drain()
        return [
            [(chunk.request.request_id, chunk.start, chunk.length) for chunk in one.chunks]
            for one in pipeline.microbatches
        ]

    assert steps("user") == steps(None)


def test_a_newcomer_goes_before_the_prompts_of_a_flood() -> None:
    pipeline = pipeline_of(slots=64)
    for number in range(30):
        add(pipeline, f"a{number}", 100, 3, "a")
    for _ in range(4):
        pipeline.fill()
        pipeline.complete()
    late = add(pipeline, "late", 10, 3, "b")
    pipeline.fill()
    assert late.num_scheduled == 10
    first = next(
        step for step in pipeline.microbatches if any(one.request is late for one in step.chunks)
    )
    prefill = [chunk for chunk in first.chunks if not chunk.is_decode]
    assert [chunk.request.tenant for chunk in prefill] == ["b", "a"], "the rest goes to the other"
    pipeline.drain()


def test_a_flood_that_comes_where_another_had_all_it_wanted_is_not_first() -> None:
    """Though the other has had more than a burst by then."""
    pipeline = pipeline_of(slots=64)
    for number in range(30):
        add(pipeline, f"early{number}", 100, 3, "b")
        pipeline.drain()
    for number in range(16):
        add(pipeline, f"a{number}", 100, 3, "a")
    for _ in range(4):
        pipeline.fill()
        pipeline.complete()
    late = add(pipeline, "late", 10, 3, "b")
    pipeline.fill()
    assert late.num_scheduled == 10
    pipeline.drain()


def test_a_full_server_gives_a_place_to_who_has_none() -> None:
    pipeline = pipeline_of(slots=4)
    floods = [add(pipeline, f"a{number}", 3, 200, "a") for number in range(8)]
    for _ in range(10):
        pipeline.fill()
        pipeline.complete()
    for number in range(4):
        add(pipeline, f"b{number}", 3, 200, "b")
    for _ in range(20):
        pipeline.fill()
        pipeline.complete()
    running = [one.tenant for one in pipeline.scheduler._running]
    assert sorted(running) == ["a", "a", "b", "b"]
    retracted = [one for one in floods if one.num_retractions]
    assert len(retracted) == 2
    # Nobody takes back what is due.
    num_retractions = pipeline.scheduler.num_retractions
    for _ in range(100):
        pipeline.fill()
        pipeline.complete()
    assert pipeline.scheduler.num_retractions == num_retractions == 2
    pipeline.drain()


def test_a_full_pool_gives_pages_to_who_holds_less() -> None:
    pipeline = pipeline_of(num_pages=100, slots=64)
    flood = [add(pipeline, f"a{number}", 18, 30, "a") for number in range(5)]
    for _ in range(30):
        pipeline.fill()
        pipeline.complete()
    late = add(pipeline, "late", 20, 5, "b")
    for _ in range(30):
        pipeline.fill()
        pipeline.complete()
    assert late.finish is not None and late.num_retractions == 0
    assert flood[0].num_retractions == 0, "the first of each tenant goes on"
    pipeline.drain()
    assert all(one.output_ids == output_when_alone(one) for one in flood)


def test_a_higher_priority_comes_before_any_share() -> None:
    pipeline = pipeline_of(slots=1)
    add(pipeline, "first", 4, 4, "a")
    pipeline.fill()
    add(pipeline, "b", 4, 1, "b")
    urgent = add(pipeline, "urgent", 4, 1, "a", priority=1)
    for _ in run(pipeline):
        if urgent.finish is not None:
            break
    assert "b" in [one.request_id for one in pipeline.scheduler.requests()]
    pipeline.drain()


def test_an_old_tenant_is_served_beside_new_ones_without_end() -> None:
    pipeline = pipeline_of(slots=2)
    old = [add(pipeline, f"old {number}", 8, 2, "old") for number in range(10)]
    for number in range(120):
        add(pipeline, f"new {number}", 8, 2, f"tenant {number}")
        pipeline.fill()
        pipeline.complete()
        if all(one.finish is not None for one in old):
            break
    else:
        raise AssertionError("the old tenant waits for ever")
    pipeline.drain()


def test_explain_says_who_is_ahead_and_who_behind() -> None:
    pipeline = pipeline_of(slots=2)
    for number in range(6):
        add(pipeline, f"a{number}", 10, 50, "alice")
    for _ in range(6):
        pipeline.fill()
        pipeline.complete()
    add(pipeline, "b0", 10, 5, "bob")
    add(pipeline, "b1", 10, 5, "bob")
    pipeline.fill()
    assert pipeline.scheduler.num_retractions == 1, "the newcomer has a place"
    ahead, first = (pipeline.scheduler.explain(name) for name in ("a5", "b1"))
    assert ahead is not None and first is not None
    assert (ahead.rule, ahead.num_ahead) == ("share", 5)
    assert re.fullmatch(
        "5 waiting requests come first; tenant 'alice' is ahead of its share: by weight it has had "
        r"\d+ tokens more than 'bob', which is next",
        ahead.text,
    )
    assert first.rule == "running-limit"
    assert re.search(
        "; tenant 'bob' is behind its share: by weight 'alice', whose requests run, has had "
        r"\d+ tokens more$",
        first.text,
    )


def test_the_state_names_tenants_and_their_shares() -> None:
    pipeline = pipeline_of(weights='{"b": 3}', slots=3)
    for number in range(9):
        add(pipeline, f"a{number}", 10, 9, "a")
        add(pipeline, f"b{number}", 10, 9, "b")
    for _ in range(6):
        pipeline.fill()
        pipeline.complete()
    states = {one.name: one for one in pipeline.core.state(0.0).tenants}
    assert set(states) == {"a", "b"}
    assert sum(one.share for one in states.values()) == pytest.approx(1.0)
    assert sum(one.running for one in states.values()) == pipeline.scheduler.num_running
    assert sum(one.waiting for one in states.values()) == pipeline.scheduler.num_waiting
    assert {one.unit for one in states.values()} == {"tokens"}
    assert (states["a"].weight, states["b"].weight) == (1.0, 3.0)
    assert min(one.lead or 0.0 for one in states.values()) == 0.0
    assert all(one.pages > 0 for one in states.values() if one.running)
    assert pipeline_of(by=None).core.state(0.0).tenants == ()


def test_the_prompt_of_a_light_tenant_is_not_cut_where_it_nearly_fits() -> None:
    args = SchedulingArgs(page_size=1, max_running_requests=64, fair_shares_by="user")
    scheduler = new_scheduler(args, ThrottleArgs(), num_pages=20_000, num_stages=2)
    # 5 ms and 0.1 a token.
    layer = LayerCost(RowCost((1.0,), (5.1,), 0.1), 0.0, 0.0, 0.0)
    costs = StepCosts(layer, flat(0.0), flat(0.0), (1.0,))
    pipeline = FakePipeline(scheduler, 1, StepPredictor(costs))
    for number in range(30):
        add(pipeline, f"a{number}", 500, 3, "a")
    for _ in range(4):
        pipeline.fill()
        pipeline.complete()
    assert sum(chunk.length for chunk in pipeline.microbatches[-1].chunks) < 80
    late = add(pipeline, "late", 90, 3, "b")
    pipeline.fill()
    assert late.num_scheduled == 90


def prefills(pipeline: FakePipeline) -> list[int]:
    """The prompt tokens of each step, all served."""
    first = len(pipeline.microbatches)
    pipeline.drain()
    return [step.work.tokens - step.work.decodes for step in pipeline.microbatches[first:]]


def test_first_steps_are_short_once_tenants_have_met() -> None:
    """Not by a request that had ended when the other tenant came, as a server's own warm-up."""
    pipeline = pipeline_of(num_stages=1, step_tokens=1000)
    add(pipeline, "warm-up", 8, 2, "anonymous")
    prefills(pipeline)
    add(pipeline, "alone", 600, 2, "a")
    assert prefills(pipeline)[0] == 600
    add(pipeline, "long", 600, 2, "a")
    add(pipeline, "newcomer", 20, 2, "b")
    met = prefills(pipeline)
    assert 0 < max(met) < 100
    add(pipeline, "alone again", 600, 2, "a")
    assert max(prefills(pipeline)) < 150, "the other may come back"
