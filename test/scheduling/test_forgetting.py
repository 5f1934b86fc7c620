"""Steps that are taken back and pages that are lost cost time: the outputs stay what they are."""

import pytest
from fault_schedules.fake_model import logprobs_of
from support.pipelines import (
    FakePipeline,
    logprobs_when_alone,
    make_request,
    new_scheduler,
    output_when_alone,
)

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.requests import FinishReason, Request, RequestState
from sgl_pipeline.scheduling.age_limit import WAITED_TOO_LONG

PAGE_SIZE = 4
PREFIX = list(range(16))


def pipeline_of(*requests: Request, max_prefill_tokens: int = 24, **args: object) -> FakePipeline:
    scheduler = new_scheduler(
        SchedulingArgs(page_size=PAGE_SIZE, **args),
        ThrottleArgs(max_prefill_tokens=max_prefill_tokens, min_prefill_tokens=1),
        num_pages=64,
        num_stages=3,
        context_length=256,
    )
    for request in requests:
        scheduler.add(request)
    return FakePipeline(scheduler, PAGE_SIZE)


def run_until(pipeline: FakePipeline, request: Request, num_tokens: int) -> None:
    """Until `request` has so many output tokens and the pipeline is full again."""
    while len(request.output_ids) < num_tokens:
        pipeline.fill()
        pipeline.complete()
    pipeline.fill()
    assert pipeline.steps_in_flight


def some_requests() -> list[Request]:
    """Prompts that share pages, log-probabilities, a grammar; the last is still being prefilled
    when the first decodes."""
    return [
        make_request("plain", [*PREFIX, 1], 12),
        make_request("rows", [*PREFIX, 2, 3], 12, logprob_start=5),
        make_request("grammar", [*PREFIX, 4], 12, constrained=True),
        make_request("long", [9] * 150, 6),
    ]


def assert_all_as_alone(requests: list[Request]) -> None:
    for request in requests:
        assert request.output_ids == output_when_alone(request), request.request_id
        assert logprobs_of(request) == logprobs_when_alone(request)


def test_steps_that_are_taken_back_are_decided_again() -> None:
    requests = some_requests()
    pipeline = pipeline_of(*requests)
    run_until(pipeline, requests[0], 3)
    computed = [request.num_computed for request in requests]
    assert any(request.num_scheduled > request.num_computed for request in requests)
    pipeline.take_back_steps()
    pipeline.scheduler.check_invariants()
    assert [request.num_computed for request in requests] == computed
    assert [request.num_scheduled for request in requests] == computed
    assert {request.steps_in_flight for request in requests} == {0}
    assert sum(request.num_retractions for request in requests) == 0
    pipeline.drain()
    assert_all_as_alone(requests)


def test_a_prompt_whose_last_chunk_is_taken_back_is_finished_again() -> None:
    """Such a request is neither prefilling nor decoding."""
    request = make_request("a", [1, 2, 3], 4)
    pipeline = pipeline_of(request)
    pipeline.fill()
    assert not request.is_prefilling and not request.output_ids
    pipeline.take_back_steps()
    pipeline.scheduler.check_invariants()
    assert request.is_prefilling
    pipeline.drain()
    assert_all_as_alone([request])


def test_a_request_that_ended_gives_its_pages_back_when_its_step_is_taken_back() -> None:
    request = make_request("a", [1] * 20, 50)
    pipeline = pipeline_of(request)
    run_until(pipeline, request, 2)
    scheduler = pipeline.scheduler
    scheduler.abort("a", FinishReason("abort"))
    assert request.pages
    pipeline.take_back_steps()
    scheduler.check_invariants()
    assert not request.pages and scheduler.is_idle
    assert scheduler.load().free_pages == scheduler.load().total_pages


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_lost_pages_are_computed_again_with_the_output_so_far(num_tokens: int) -> None:
    requests = some_requests()
    pipeline = pipeline_of(*requests)
    run_until(pipeline, requests[0], num_tokens)
    outputs = [list(request.output_ids) for request in requests]
    pipeline.lose_stages()
    pipeline.scheduler.check_invariants()
    assert [request.output_ids for request in requests] == outputs
    assert {request.state for request in requests} == {RequestState.WAITING}
    pipeline.drain()
    assert_all_as_alone(requests)


def test_nothing_that_was_cached_is_served_by_stages_that_have_not_computed_it() -> None:
    first = make_request("first", [*PREFIX, 1], 2)
    pipeline = pipeline_of(first)
    pipeline.drain()
    scheduler = pipeline.scheduler
    again = make_request("again", [*PREFIX, 2], 3)
    scheduler.add(again)
    assert scheduler.load().waiting_tokens < len(PREFIX)
    pipeline.lose_stages()
    assert scheduler.load().waiting_tokens == len(again.prompt_ids)
    assert scheduler.num_free_pages == scheduler.load().total_pages
    pipeline.drain()
    assert again.cached_tokens == 0
    assert_all_as_alone([again])


def test_requests_that_ran_go_before_newcomers_and_in_their_order() -> None:
    running = [make_request(f"r{i}", [i] * 20, 30) for i in range(3)]
    pipeline = pipeline_of(*running, max_running_requests=3)
    run_until(pipeline, running[2], 1)
    newcomers = [make_request(f"n{i}", [7 + i] * 20, 2) for i in range(2)]
    for newcomer in newcomers:
        pipeline.scheduler.add(newcomer)
    pipeline.lose_stages()
    num_before = len(pipeline.microbatches)
    pipeline.drain()
    later = pipeline.microbatches[num_before:]
    order = [chunk.request.request_id for one in later for chunk in one.chunks]
    assert list(dict.fromkeys(order)) == ["r0", "r1", "r2", "n0", "n1"]
    assert_all_as_alone([*running, *newcomers])


def test_a_request_that_waits_for_another_ones_prefill_is_not_left_behind() -> None:
    prompt = [3] * 100
    computing, parked = make_request("a", prompt, 3), make_request("b", prompt, 3)
    pipeline = pipeline_of(computing, parked)
    pipeline.fill()
    assert pipeline.scheduler.explain("b") is not None
    assert computing.state is RequestState.RUNNING and parked.state is RequestState.WAITING
    pipeline.lose_stages()
    pipeline.drain()
    assert_all_as_alone([computing, parked])


def test_the_time_of_a_request_that_went_back_begins_to_count_as_waiting() -> None:
    request = make_request("a", [1] * 20, 30)
    pipeline = pipeline_of(request, waiting_timeout_s=5.0)
    run_until(pipeline, request, 2)
    pipeline.now_s = 100.0
    pipeline.lose_stages()
    assert pipeline.scheduler.end_overdue(104.0) == []
    assert pipeline.scheduler.end_overdue(106.0) == [request]
    assert request.finish is WAITED_TOO_LONG


def test_a_stage_lost_in_a_pause_leaves_the_pause_as_it_is() -> None:
    requests = some_requests()
    pipeline = pipeline_of(*requests)
    run_until(pipeline, requests[0], 2)
    pipeline.scheduler.pausing.pause(retract=False)
    pipeline.lose_stages()
    assert pipeline.schedule() is None and pipeline.scheduler.pausing.is_paused
    pipeline.scheduler.pausing.resume()
    pipeline.drain()
    assert_all_as_alone(requests)


def test_a_pause_that_retracts_has_done_so_when_steps_are_taken_back() -> None:
    requests = some_requests()
    pipeline = pipeline_of(*requests)
    run_until(pipeline, requests[0], 2)
    pipeline.scheduler.pausing.pause(retract=True)
    assert pipeline.scheduler.num_running
    pipeline.take_back_steps()
    assert pipeline.scheduler.num_running == 0
    pipeline.scheduler.pausing.resume()
    pipeline.drain()
    assert_all_as_alone(requests)
