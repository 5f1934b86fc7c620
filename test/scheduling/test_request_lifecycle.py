"""Priorities, a full queue, and requests that wait or run for too long."""

from typing import Any

import pytest
from support.pipelines import (
    FakePipeline,
    make_request,
    new_pipeline,
    output_when_alone,
)

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.errors import QueueFullError
from sgl_pipeline.requests import RequestState


def pipeline_of(
    num_pages: int = 1000, num_stages: int = 1, policy: str = "sarathi", **scheduling: Any
) -> FakePipeline:
    args = SchedulingArgs(**({"page_size": 1, "radix_cache": False} | scheduling))
    return new_pipeline(
        args,
        ThrottleArgs(policy=policy),
        num_pages=num_pages,
        num_stages=num_stages,
        context_length=100_000,
    )


def advance(pipeline: FakePipeline, num_steps: int) -> None:
    """Books that many steps; the pipeline is full before each."""
    for _ in range(num_steps):
        pipeline.fill()
        pipeline.complete()
        pipeline.scheduler.check_invariants()


def all_pages_are_back(pipeline: FakePipeline) -> bool:
    load = pipeline.scheduler.load()
    return load.free_pages == load.total_pages and load.waiting_tokens == 0


# Priorities


def test_the_higher_priority_is_admitted_first_and_equals_by_arrival() -> None:
    pipeline = pipeline_of(max_running_requests=1)
    requests = {
        name: make_request(name, [1, 2], priority=priority)
        for name, priority in [("low", -1), ("first", 3), ("second", 3), ("high", 9)]
    }
    for request in requests.values():
        pipeline.scheduler.add(request)
    finished = [event.request.request_id for event in pipeline.drain() if event.finish]
    assert finished == ["high", "first", "second", "low"]


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_much_higher_priority_takes_a_running_ones_slot_and_both_finish_right(
    num_stages: int,
) -> None:
    pipeline = pipeline_of(num_stages=num_stages, max_running_requests=2, preemption_threshold=10)
    older, newer = (make_request(name, [1, 2, 3], 20) for name in ("older", "newer"))
    pipeline.scheduler.add(older)
    pipeline.scheduler.add(newer)
    advance(pipeline, 4)
    urgent = make_request("urgent", [4, 5], 3, priority=11)
    pipeline.scheduler.add(urgent)
    finished = [event.request.request_id for event in pipeline.drain() if event.finish]
    assert finished[0] == "urgent"
    assert (older.num_retractions, newer.num_retractions, urgent.num_retractions) in (
        [(0, 1, 0)] if num_stages == 1 else [(0, 1, 0), (1, 0, 0)]
    )
    for request in (older, newer, urgent):
        assert request.output_ids == output_when_alone(request)
    assert all_pages_are_back(pipeline)


@pytest.mark.parametrize("radix_cache", [False, True])
def test_a_much_higher_priority_takes_the_pages_that_it_needs(radix_cache: bool) -> None:
    pipeline = pipeline_of(num_pages=40, preemption_threshold=0, radix_cache=radix_cache)
    pipeline.scheduler.add(make_request("before", [7] * 5, 1))
    pipeline.drain()
    running = [make_request(f"running{i}", [i] * 10, 8) for i in range(3)]
    for request in running:
        pipeline.scheduler.add(request)
    advance(pipeline, 1)
    urgent = make_request("urgent", [7] * 20, 2, priority=1)
    pipeline.scheduler.add(urgent)
    advance(pipeline, 1)
    assert urgent.state is RequestState.RUNNING
    assert [request.num_retractions for request in running] == [0, 1, 1]
    pipeline.drain()
    assert all(request.output_ids == output_when_alone(request) for request in running)
    assert all_pages_are_back(pipeline)


def test_a_step_is_decided_after_others_have_made_room_for_it() -> None:
    """With the pool full of decodes the throttle lets no prompt in; once they have given way, there
    is nothing else to run."""
    pipeline = pipeline_of(num_pages=60, policy="throttle", preemption_threshold=0)
    decoding = make_request("decoding", range(58), 2)
    pipeline.scheduler.add(decoding)
    advance(pipeline, 2)
    pipeline.scheduler.add(make_request("urgent", [7] * 9, 2, priority=1))
    microbatch = pipeline.schedule()
    assert decoding.num_retractions == 1
    assert microbatch is not None
    assert [chunk.request.request_id for chunk in microbatch.chunks] == ["urgent"]


@pytest.mark.parametrize(("threshold", "priority"), [(None, 99), (10, 10), (10, 0)])
def test_nobody_is_preempted_below_the_threshold(threshold: int | None, priority: int) -> None:
    pipeline = pipeline_of(max_running_requests=1, preemption_threshold=threshold)
    running = make_request("running", [1, 2], 10)
    pipeline.scheduler.add(running)
    advance(pipeline, 2)
    pipeline.scheduler.add(make_request("other", [3], priority=priority))
    pipeline.drain()
    assert running.num_retractions == 0


# A full queue


def test_a_full_queue_gives_way_to_a_higher_priority_only() -> None:
    pipeline = pipeline_of(max_queued_requests=2)
    scheduler = pipeline.scheduler
    low, lower = make_request("low", [1], priority=-1), make_request("lower", [1], priority=-1)
    assert scheduler.add(low) is None
    assert scheduler.add(lower) is None
    with pytest.raises(QueueFullError):
        scheduler.add(make_request("equal", [1], priority=-1))
    assert scheduler.add(make_request("higher", [1], priority=0)) is lower
    assert lower.state is RequestState.FINISHED
    assert lower.finish is not None and lower.finish.status_code == 503
    assert lower.finish.message == "The request is aborted by a higher priority request."
    finished = [event.request.request_id for event in pipeline.drain() if event.finish]
    assert finished == ["higher", "low"]
    assert all_pages_are_back(pipeline)


def test_nobody_leaves_a_full_queue_for_an_equal() -> None:
    scheduler = pipeline_of(max_queued_requests=2).scheduler
    low, middle = make_request("low", [1], priority=-1), make_request("middle", [1])
    scheduler.add(low)
    scheduler.add(middle)
    assert scheduler.add(make_request("first", [1])) is low
    with pytest.raises(QueueFullError):
        scheduler.add(make_request("second", [1]))


def test_without_priorities_a_full_queue_refuses() -> None:
    scheduler = pipeline_of(max_queued_requests=1).scheduler
    scheduler.add(make_request("first", [1]))
    with pytest.raises(QueueFullError, match="--max-queued-requests"):
        scheduler.add(make_request("second", [1]))


# Too long


def finishes(pipeline: FakePipeline, now_s: float) -> list[tuple[str, str, int | None]]:
    ended = pipeline.scheduler.end_overdue(now_s)
    pipeline.scheduler.check_invariants()
    return [
        (request.request_id, request.finish.message, request.finish.status_code)
        for request in ended
        if request.finish is not None
    ]


def test_a_request_that_waits_too_long_is_ended_and_one_that_runs_is_not() -> None:
    pipeline = pipeline_of(max_running_requests=1, waiting_timeout_s=2.0)
    running, waiting = make_request("running", [1], 20), make_request("waiting", [2])
    running.arrival_s, waiting.arrival_s = 0.0, 1.0
    pipeline.scheduler.add(running)
    pipeline.scheduler.add(waiting)
    advance(pipeline, 1)
    assert finishes(pipeline, 3.0) == []
    assert finishes(pipeline, 3.5) == [("waiting", "Request waiting timeout reached.", 503)]
    assert finishes(pipeline, 100.0) == []
    pipeline.drain()
    assert running.output_ids == output_when_alone(running)
    assert all_pages_are_back(pipeline)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_request_that_runs_too_long_is_ended_and_its_pages_come_back(num_stages: int) -> None:
    pipeline = pipeline_of(num_stages=num_stages, running_timeout_s=5.0)
    early, late = make_request("early", [1, 2], 50), make_request("late", [3], 50)
    pipeline.scheduler.add(early)
    pipeline.now_s = 1.0
    advance(pipeline, 2)
    pipeline.scheduler.add(late)
    pipeline.now_s = 4.0
    advance(pipeline, 2)
    pipeline.fill()
    assert finishes(pipeline, 6.5) == [("early", "Request running timeout reached.", 503)]
    advance(pipeline, 3)
    assert finishes(pipeline, 9.5) == [("late", "Request running timeout reached.", 503)]
    pipeline.drain()
    assert pipeline.scheduler.is_idle
    assert all_pages_are_back(pipeline)


def test_the_time_of_a_finished_request_does_not_count_for_the_next_of_its_name() -> None:
    pipeline = pipeline_of(running_timeout_s=5.0)
    pipeline.scheduler.add(make_request("r", [1], 2))
    pipeline.drain()
    pipeline.now_s = 4.0
    pipeline.scheduler.add(make_request("r", [1], 2))
    advance(pipeline, 1)
    assert finishes(pipeline, 6.0) == []


def test_after_a_retraction_the_wait_begins_anew_and_the_run_goes_on() -> None:
    def retracted_at_ten(**limits: float) -> FakePipeline:
        pipeline = pipeline_of(max_running_requests=1, preemption_threshold=0, **limits)
        pipeline.scheduler.add(make_request("victim", [1], 50))
        advance(pipeline, 1)
        pipeline.now_s = 10.0
        urgent = make_request("urgent", [2], 50, priority=1)
        urgent.arrival_s = 10.0
        pipeline.scheduler.add(urgent)
        advance(pipeline, 1)
        return pipeline

    pipeline = retracted_at_ten(waiting_timeout_s=5.0)
    assert finishes(pipeline, 14.0) == []
    assert [request for request, *_ in finishes(pipeline, 15.5)] == ["victim"]
    pipeline = retracted_at_ten(running_timeout_s=12.0)
    assert [request for request, *_ in finishes(pipeline, 12.5)] == ["victim"]
    assert [request for request, *_ in finishes(pipeline, 22.5)] == ["urgent"]
    pipeline.drain()
    assert all_pages_are_back(pipeline)


# The times of a request


def test_a_request_knows_when_it_first_ran_and_when_its_first_token_was_known() -> None:
    pipeline = pipeline_of()
    request = make_request("a", [1, 2, 3], 3)
    pipeline.scheduler.add(request)
    assert (request.started_s, request.first_token_s) == (None, None)
    for now_s in (5.0, 7.0, 9.0):
        pipeline.now_s = now_s
        pipeline.fill()
        pipeline.now_s = now_s + 1
        pipeline.complete()
    assert request.finish is not None
    assert (request.started_s, request.first_token_s) == (5.0, 6.0)


def test_a_retraction_does_not_change_when_a_request_first_ran() -> None:
    pipeline = pipeline_of()
    request = make_request("a", [1, 2, 3], 4)
    pipeline.scheduler.add(request)
    pipeline.now_s = 5.0
    advance(pipeline, 1)
    pipeline.scheduler.pausing.pause(retract=True)
    pipeline.scheduler.pausing.resume()
    pipeline.now_s = 8.0
    advance(pipeline, 3)
    assert request.num_retractions == 1
    assert request.finish is not None
    assert (request.started_s, request.first_token_s) == (5.0, 5.0)
