"""In which order waiting requests are let in: `--schedule-policy`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pipelines import FakePipeline, make_request, output_when_alone

from sgl_pipeline.args import SCHEDULE_POLICIES, SchedulingArgs, ThrottleArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.throttle import make_policy


def pipeline_of(
    schedule_policy: str,
    *,
    num_pages: int = 1000,
    num_stages: int = 2,
    throttle: ThrottleArgs | None = None,
    max_running_requests: int = 256,
) -> FakePipeline:
    """Pages of one token."""
    args = SchedulingArgs(
        page_size=1, schedule_policy=schedule_policy, max_running_requests=max_running_requests
    )
    policy = make_policy(throttle or ThrottleArgs(policy="sarathi"))
    scheduler = StepScheduler(
        args, policy, num_pages=num_pages, num_stages=num_stages, context_length=10_000
    )
    return FakePipeline(scheduler, args.page_size)


def admitted(pipeline: FakePipeline, requests: list[Request]) -> list[str]:
    """Adds all, serves them, and returns their ids in the order of their first chunks."""
    for request in requests:
        pipeline.scheduler.add(request)
    pipeline.drain()
    chunks = [chunk for microbatch in pipeline.microbatches for chunk in microbatch.chunks]
    return list(dict.fromkeys(chunk.request.request_id for chunk in chunks))


def mixed_requests() -> list[Request]:
    return [
        make_request("short", [1], 2),
        make_request("long", [2], 9),
        make_request("long too", [3], 9),
        make_request("urgent", [4], 1, priority=1),
        make_request("middle", [5], 5),
    ]


@pytest.mark.parametrize(
    ("schedule_policy", "expected"),
    [
        ("fcfs", ["urgent", "short", "long", "long too", "middle"]),
        ("lof", ["urgent", "long", "long too", "middle", "short"]),
    ],
)
def test_priority_goes_first_then_the_policy_then_arrival(
    schedule_policy: str, expected: list[str]
) -> None:
    pipeline = pipeline_of(schedule_policy, max_running_requests=1)
    assert admitted(pipeline, mixed_requests()) == expected


def test_the_shortest_output_is_retracted_first_though_it_came_first() -> None:
    pipeline = pipeline_of("lof", num_pages=10, num_stages=1)
    short, long = make_request("short", [1, 2, 3], 5), make_request("long", [4, 5, 6], 6)
    assert admitted(pipeline, [short, long]) == ["long", "short"]
    assert (short.num_retractions > 0, long.num_retractions) == (True, 0)


def test_longest_outputs_first_leave_no_tail_of_lone_decodes() -> None:
    """One long output among short ones, behind them: it decodes while their prompts are computed,
    not after."""

    def num_steps(schedule_policy: str) -> int:
        throttle = ThrottleArgs(max_prefill_tokens=10, min_prefill_tokens=10)
        pipeline = pipeline_of(schedule_policy, num_stages=1, throttle=throttle)
        requests = [make_request(str(i), [i] * 10, 2) for i in range(20)]
        admitted(pipeline, [*requests, make_request("last", [99] * 10, 20)])
        return len(pipeline.microbatches)

    assert (num_steps("fcfs"), num_steps("lof")) == (21 + 19, 21 + 1)


@given(
    schedule_policy=st.sampled_from(SCHEDULE_POLICIES),
    shapes=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(0, 1)), max_size=9
    ),
    num_pages=st.integers(24, 60),
)
def test_outputs_do_not_depend_on_the_order(
    schedule_policy: str, shapes: list[tuple[int, int, int]], num_pages: int
) -> None:
    pipeline = pipeline_of(schedule_policy, num_pages=num_pages)
    requests = [
        make_request(str(i), range(i, i + length), max_new_tokens, priority=priority)
        for i, (length, max_new_tokens, priority) in enumerate(shapes)
    ]
    admitted(pipeline, requests)
    for request in requests:
        assert request.output_ids == output_when_alone(request)


def test_another_policy_is_refused_in_words_of_the_flag() -> None:
    with pytest.raises(ConfigurationError, match=r"--schedule-policy 'random' .*fcfs, lof, lpm"):
        SchedulingArgs(schedule_policy="random")
