"""A pause starts nothing and loses nothing: the outputs are those of requests that run alone."""

from support.pipelines import FakePipeline, make_request, new_scheduler, output_when_alone

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.requests import FinishReason, Request, RequestState

PAGE_SIZE = 4


def paused_midway(
    *, retract: bool, waiting_timeout_s: float | None = None
) -> tuple[FakePipeline, list[Request]]:
    """Four requests in two stages, some prefilling and some decoding, steps in flight; paused."""
    scheduler = new_scheduler(
        SchedulingArgs(page_size=PAGE_SIZE, waiting_timeout_s=waiting_timeout_s),
        ThrottleArgs(max_prefill_tokens=24, min_prefill_tokens=1),
        num_pages=64,
        num_stages=2,
        context_length=256,
    )
    requests = [make_request(f"r{i}", [i, *range(20)], 12) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    pipeline = FakePipeline(scheduler, PAGE_SIZE)
    for _ in range(6):
        pipeline.fill()
        pipeline.complete()
        if any(request.output_ids for request in requests):
            break
    pipeline.fill()
    assert pipeline.steps_in_flight == 2
    scheduler.pausing.pause(retract=retract)
    return pipeline, requests


def finish_steps_in_flight(pipeline: FakePipeline) -> None:
    assert pipeline.schedule() is None
    while pipeline.steps_in_flight:
        pipeline.complete()
        pipeline.scheduler.check_invariants()
        assert pipeline.schedule() is None


def assert_served_as_alone(pipeline: FakePipeline, requests: list[Request]) -> None:
    pipeline.scheduler.pausing.resume()
    pipeline.drain()
    for request in requests:
        assert request.output_ids == output_when_alone(request)


def test_a_pause_in_place_finishes_steps_in_flight_and_starts_none() -> None:
    pipeline, requests = paused_midway(retract=False)
    running = pipeline.scheduler.num_running
    assert running > 1
    finish_steps_in_flight(pipeline)
    assert pipeline.scheduler.num_running == running
    assert sum(request.num_retractions for request in requests) == 0
    assert_served_as_alone(pipeline, requests)


def test_a_pause_that_retracts_sends_every_request_back_to_the_queue() -> None:
    pipeline, requests = paused_midway(retract=True)
    finish_steps_in_flight(pipeline)
    assert pipeline.scheduler.num_running == 0
    assert {request.state for request in requests} == {RequestState.WAITING}
    retractions = [request.num_retractions for request in requests]
    assert max(retractions) == 1
    assert_served_as_alone(pipeline, requests)
    assert [request.num_retractions for request in requests] == retractions


def test_a_pause_in_place_can_become_one_that_retracts() -> None:
    pipeline, requests = paused_midway(retract=False)
    finish_steps_in_flight(pipeline)
    pipeline.scheduler.pausing.pause(retract=True)
    assert pipeline.scheduler.num_running == 0
    assert_served_as_alone(pipeline, requests)


def test_the_cache_can_be_flushed_in_a_pause_once_nothing_holds_pages() -> None:
    pipeline, requests = paused_midway(retract=True)
    scheduler = pipeline.scheduler
    assert not scheduler.flush_cache()  # steps are in flight
    finish_steps_in_flight(pipeline)
    assert scheduler.flush_cache()
    assert scheduler.load().free_pages == scheduler.load().total_pages
    assert scheduler.load().waiting_tokens >= sum(len(request.prompt_ids) for request in requests)
    scheduler.check_invariants()
    assert_served_as_alone(pipeline, requests)
    scheduler.add(make_request("waits", [1]))
    assert not scheduler.flush_cache()  # not paused any more


def test_the_cache_cannot_be_flushed_while_a_pause_in_place_holds_pages() -> None:
    pipeline, _ = paused_midway(retract=False)
    finish_steps_in_flight(pipeline)
    assert not pipeline.scheduler.flush_cache()


def test_requests_come_and_go_in_a_pause() -> None:
    pipeline, requests = paused_midway(retract=False)
    scheduler = pipeline.scheduler
    finish_steps_in_flight(pipeline)
    aborted, *others = requests
    assert scheduler.abort(aborted.request_id, FinishReason("abort")) is aborted
    others.append(make_request("new", [7, 8, 9]))
    scheduler.add(others[-1])
    scheduler.check_invariants()
    assert_served_as_alone(pipeline, others)
    assert scheduler.is_idle


def test_no_clock_runs_for_a_request_that_ended_in_the_pause_that_retracted_it() -> None:
    """Else its time would end whoever has its id by then."""
    pipeline, requests = paused_midway(retract=True, waiting_timeout_s=100.0)
    scheduler = pipeline.scheduler
    finish_steps_in_flight(pipeline)
    retracted = next(request for request in requests if request.num_retractions)
    scheduler.abort(retracted.request_id, FinishReason("abort"))
    scheduler.pausing.resume()
    pipeline.drain()
    pipeline.now_s += 50.0
    # Runs at once and for long.
    namesake = make_request(retracted.request_id, [1, 2, 3], 200)
    namesake.arrival_s = pipeline.now_s
    scheduler.add(namesake)
    pipeline.fill()
    pipeline.now_s += 51.0
    assert scheduler.end_overdue(pipeline.now_s) == []


def test_a_resume_without_a_pause_changes_nothing() -> None:
    pipeline, requests = paused_midway(retract=True)
    pipeline.scheduler.pausing.resume()
    assert_served_as_alone(pipeline, requests)
