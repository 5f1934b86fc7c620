"""Each rule that can hold a request back is named, with its numbers and who is in front."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipelines import FakePipeline, make_request, new_pipeline

from sgl_pipeline.args import SCHEDULE_POLICIES, SchedulingArgs, ThrottleArgs
from sgl_pipeline.requests import RequestState
from sgl_pipeline.scheduling import Explanation

PAGE_SIZE = 4


def pipeline_of(
    *, num_pages: int = 64, num_stages: int = 2, policy: str = "sarathi", **options: int | str
) -> FakePipeline:
    args = SchedulingArgs(page_size=PAGE_SIZE, **options)  # type: ignore[arg-type]
    throttle = ThrottleArgs(policy=policy, max_prefill_tokens=8, min_prefill_tokens=1)
    return new_pipeline(args, throttle, num_pages=num_pages, num_stages=num_stages)


def explain(pipeline: FakePipeline, request_id: str) -> Explanation:
    explanation = pipeline.core.explain(request_id)
    assert explanation is not None
    return explanation


def test_an_unknown_or_ended_request_is_not_explained() -> None:
    pipeline = pipeline_of()
    pipeline.scheduler.add(make_request("a", [1], 1))
    pipeline.drain()
    assert pipeline.core.explain("a") is None and pipeline.core.explain("b") is None


def test_the_first_waits_for_the_budget_and_the_others_for_those_before_them() -> None:
    pipeline = pipeline_of()
    for name in "abc":
        pipeline.scheduler.add(make_request(name, [ord(name) % 5] * 3, 4))
    first, last = explain(pipeline, "a"), explain(pipeline, "c")
    assert (first.state, first.rule, first.behind) == ("waiting", "budget", None)
    assert "a step may prefill 8 prompt tokens (bound by MaxP)" in first.text
    assert (last.rule, last.behind, last.num_ahead) == ("order", "b", 2)


def test_priorities_count_in_who_is_ahead() -> None:
    pipeline = pipeline_of()
    pipeline.scheduler.add(make_request("low", [1], 4))
    pipeline.scheduler.add(make_request("high", [2], 4, priority=5))
    assert explain(pipeline, "low").behind == "high"
    assert explain(pipeline, "high").rule == "budget"


def test_a_longer_cached_prefix_is_named_as_the_reason() -> None:
    pipeline = pipeline_of(schedule_policy="lpm")
    pipeline.scheduler.add(make_request("a", [1] * 8 + [2], 1))
    pipeline.drain()
    pipeline.scheduler.add(make_request("cold", [3] * 9, 4))
    pipeline.scheduler.add(make_request("warm", [1] * 8 + [4], 4))
    found = explain(pipeline, "cold")
    assert (found.rule, found.behind, found.num_ahead) == ("order", "warm", 1)
    assert found.text == (
        "1 waiting request comes first; request warm has a longer cached prefix (8 tokens, this "
        "one 0)"
    )
    assert explain(pipeline, "warm").rule == "budget"


def test_a_step_in_the_pipeline_is_waited_for() -> None:
    pipeline = pipeline_of()
    pipeline.scheduler.add(make_request("a", [1] * 12, 4))
    pipeline.fill()
    found = explain(pipeline, "a")
    assert (found.state, found.rule) == ("prefilling", "in-flight")
    assert found.text == "2 steps of it are in the pipeline"


def test_a_prefill_between_steps_waits_for_the_budget() -> None:
    pipeline = pipeline_of(num_stages=1)
    pipeline.scheduler.add(make_request("a", [1] * 40, 4))
    pipeline.schedule()
    pipeline.complete()
    found = explain(pipeline, "a")
    assert (found.state, found.rule) == ("prefilling", "budget")
    assert found.text.startswith("32 prompt tokens are left, a step may prefill 8 ")


def test_a_pause_holds_all() -> None:
    pipeline = pipeline_of()
    pipeline.scheduler.add(make_request("a", [1], 4))
    pipeline.scheduler.pausing.pause(retract=False)
    assert explain(pipeline, "a").rule == "pause"


def test_as_many_run_as_may() -> None:
    pipeline = pipeline_of(max_running_requests=1)
    pipeline.scheduler.add(make_request("a", [1], 9))
    pipeline.scheduler.add(make_request("b", [2], 9))
    pipeline.schedule()
    found = explain(pipeline, "b")
    assert (found.rule, found.behind) == ("running-limit", None)
    assert "1 requests run, the limit is --max-running-requests" in found.text


def test_a_prefill_that_does_not_fit_names_its_pages() -> None:
    pipeline = pipeline_of(num_pages=10)
    pipeline.scheduler.add(make_request("a", [1] * 8, 20))
    pipeline.scheduler.add(make_request("b", [2] * 32, 1))
    pipeline.fill()
    found = explain(pipeline, "b")
    assert found.rule == "pages"
    assert found.text.startswith("its prefill needs 8 pages; 8 are free or evictable, of which a p")


def test_who_computes_a_shared_prefix_is_named_and_parked_ones_hold_nobody_back() -> None:
    pipeline = pipeline_of()
    pipeline.scheduler.add(make_request("a", [1] * 20 + [2], 4))
    pipeline.scheduler.add(make_request("b", [1] * 20 + [3], 4))
    pipeline.scheduler.add(make_request("c", [4] * 20, 4))
    pipeline.fill()
    found = explain(pipeline, "b")
    assert (found.rule, found.behind) == ("shared-prefix", "a")
    assert found.text == "request a is computing 20 tokens that this one needs too"
    assert explain(pipeline, "c").rule == "budget"


def test_ready_decodes_take_turns() -> None:
    pipeline = pipeline_of(policy="throttle", num_stages=2)
    for name in "abcd":
        pipeline.scheduler.add(make_request(name, [ord(name) % 5], 30))
    for _ in range(12):
        pipeline.fill()
        pipeline.complete()
    ready = [name for name in "abcd" if explain(pipeline, name).rule == "turn"]
    assert ready
    found = explain(pipeline, ready[0])
    assert found.state == "decoding"
    assert found.text == (
        f"{len(ready)} requests are ready to decode, a step takes 2, the longest ready first"
    )


def test_a_limit_of_decodes_that_holds_a_request_is_named() -> None:
    pipeline = pipeline_of(policy="sarathi", num_stages=1, max_decodes_per_step=3)
    for name in "abcd":
        pipeline.scheduler.add(make_request(name, [ord(name) % 5], 30))
    pipeline.fill()
    pipeline.complete()
    assert explain(pipeline, "d").text == (
        "4 requests are ready to decode, a step takes 3 (--pp-max-micro-batch-size), the longest "
        "ready first"
    )


@settings(deadline=None, max_examples=50)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=8),
    num_steps=st.integers(0, 12),
    num_pages=st.integers(8, 20),
)
def test_every_live_request_has_an_explanation_that_changes_nothing(
    prompts: list[list[int]], num_steps: int, num_pages: int
) -> None:
    pipeline = pipeline_of(num_pages=num_pages, max_running_requests=3)
    for number, prompt in enumerate(prompts):
        pipeline.scheduler.add(make_request(str(number), prompt, 6))
    for _ in range(num_steps):
        pipeline.fill()
        if pipeline.steps_in_flight:
            pipeline.complete()
        before = (pipeline.scheduler.load(), [r.order for r in pipeline.scheduler.requests()])
        for request in pipeline.scheduler.requests():
            found = explain(pipeline, request.request_id)
            assert (found.state == "waiting") == (request.state is RequestState.WAITING)
            assert found.behind != request.request_id
            assert found.num_retractions == request.num_retractions
        pipeline.scheduler.check_invariants()
        assert before == (
            pipeline.scheduler.load(),
            [r.order for r in pipeline.scheduler.requests()],
        )
    pipeline.drain()


@pytest.mark.parametrize("policy", ["throttle", "greedy-queue"])
def test_below_the_threshold_the_pause_of_prefill_is_the_bound(policy: str) -> None:
    pipeline = pipeline_of(policy=policy, num_pages=42)
    pipeline.scheduler.add(make_request("a", [1] * 160, 4))
    while explain(pipeline, "a").state != "decoding":
        pipeline.schedule()
        pipeline.complete()
    pipeline.scheduler.add(make_request("b", [2], 1))
    bound = {"throttle": "pause", "greedy-queue": "MaxP"}[policy]
    assert f"(bound by {bound})" in explain(pipeline, "b").text


@settings(deadline=None, max_examples=50)
@given(
    prompts=st.lists(
        st.tuples(st.sampled_from([9, 22]), st.integers(0, 1), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    ),
    num_steps=st.integers(0, 4),
    num_shown=st.integers(1, 12),
    is_paused=st.booleans(),
    schedule_policy=st.sampled_from(SCHEDULE_POLICIES),
)
def test_the_whole_queue_is_explained_as_each_request_by_itself(
    prompts: list[tuple[int, int, int]],
    num_steps: int,
    num_shown: int,
    is_paused: bool,
    schedule_policy: str,
) -> None:
    pipeline = pipeline_of(num_pages=12, max_running_requests=3, schedule_policy=schedule_policy)
    for number, (length, beginning, priority) in enumerate(prompts):
        prompt = [beginning] * length + [number + 2]
        pipeline.scheduler.add(make_request(str(number), prompt, 6, priority=priority))
    for _ in range(num_steps):
        pipeline.fill()
        if pipeline.steps_in_flight:
            pipeline.complete()
    pipeline.schedule()
    if is_paused:
        pipeline.scheduler.pausing.pause(retract=False)
    waiting = [r for r in pipeline.scheduler.requests() if r.state is RequestState.WAITING]
    waiting = pipeline.scheduler._waiting._order.ranked(waiting)
    expected = [(one, explain(pipeline, one.request_id)) for one in waiting[:num_shown]]
    assert pipeline.scheduler.explain_queue(num_shown) == expected
