"""What a request waits for is counted once, whoever shares it, and in order of service."""

from support.pipelines import FakePipeline, make_request, new_pipeline

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.scheduling import Outlook

PAGE_SIZE = 4
PREFIX = [5] * 16


def pipeline_of(max_prefill_tokens: int = 8, schedule_policy: str = "fcfs") -> FakePipeline:
    throttle = ThrottleArgs(
        policy="sarathi", max_prefill_tokens=max_prefill_tokens, min_prefill_tokens=1
    )
    return new_pipeline(
        SchedulingArgs(page_size=PAGE_SIZE, schedule_policy=schedule_policy),
        throttle,
        num_pages=64,
        num_stages=2,
        context_length=200,
    )


def outlook(pipeline: FakePipeline, request_id: str) -> Outlook:
    found = pipeline.scheduler.outlook(request_id)
    assert found is not None
    return found


def test_an_unknown_request_has_no_outlook() -> None:
    assert pipeline_of().scheduler.outlook("a") is None


def test_a_prefix_that_several_wait_for_counts_with_the_first() -> None:
    pipeline = pipeline_of()
    pipeline.scheduler.add(make_request("a", [*PREFIX, 1, 1]))
    pipeline.scheduler.add(make_request("b", [*PREFIX, 2, 2, 2, 2, 2]))
    pipeline.scheduler.add(make_request("c", [3] * 6))
    found = outlook(pipeline, "c")
    assert [one.request.request_id for one in found.waiting] == ["a", "b", "c"]
    assert [one.prefill_tokens for one in found.waiting] == [18, 5, 6]
    assert [one.new_pages for one in found.waiting] == [5, 2, 2]
    assert found.tokens_ahead == 23 and found.own.prefill_tokens == 6
    assert outlook(pipeline, "b").tokens_ahead == 18


def test_what_a_running_request_computes_is_its_own_and_what_is_cached_nobodys() -> None:
    pipeline = pipeline_of()
    pipeline.scheduler.add(make_request("a", [*PREFIX, 1, 1], 20))
    pipeline.scheduler.add(make_request("b", [*PREFIX, 2, 2, 2, 2, 2]))
    pipeline.schedule()
    found = outlook(pipeline, "b")
    assert [(one.request.request_id, one.prefill_tokens) for one in found.prefilling] == [("a", 10)]
    assert found.own.prefill_tokens == 5 and found.tokens_ahead == 10
    while pipeline.steps_in_flight:
        pipeline.complete()
        pipeline.schedule()
        if outlook(pipeline, "a").decoding:
            break
    pipeline.scheduler.add(make_request("c", [*PREFIX, 4, 4, 4]))
    assert outlook(pipeline, "c").own.prefill_tokens == 3


def test_a_longer_cached_prefix_is_ahead_though_it_came_later() -> None:
    pipeline = pipeline_of(schedule_policy="lpm")
    pipeline.scheduler.add(make_request("warm", [*PREFIX, 1, 1], 1))
    pipeline.drain()
    pipeline.scheduler.add(make_request("running", [4] * 18, 9))
    pipeline.schedule()
    pipeline.scheduler.add(make_request("cold", [3] * 6))
    pipeline.scheduler.add(make_request("hit", [*PREFIX, 2, 2, 2, 2, 2]))
    found = outlook(pipeline, "cold")
    assert [one.request.request_id for one in found.waiting] == ["hit", "cold"]
    assert [one.prefill_tokens for one in found.waiting] == [5, 6]
    # The running prefill has ten of its tokens left.
    assert (found.tokens_ahead, outlook(pipeline, "hit").tokens_ahead) == (15, 10)


def test_a_running_prefill_is_before_a_waiting_request_of_higher_priority() -> None:
    pipeline = pipeline_of()
    pipeline.scheduler.add(make_request("running", [4] * 18, 9))
    pipeline.schedule()
    pipeline.scheduler.add(make_request("urgent", [3] * 6, priority=1))
    assert outlook(pipeline, "urgent").tokens_ahead == 10


def test_decodes_come_in_their_turn_and_those_in_flight_last() -> None:
    pipeline = pipeline_of(max_prefill_tokens=64)
    for name in "abc":
        pipeline.scheduler.add(make_request(name, [ord(name) % 5], 30))
    pipeline.fill()
    pipeline.complete()
    pipeline.schedule()
    pipeline.scheduler.add(make_request("d", [9] * 3, 30))
    found = outlook(pipeline, "a")
    in_flight = {one.request.request_id for one in found.decoding if one.request.steps_in_flight}
    names = [one.request.request_id for one in found.decoding]
    assert sorted(names) == ["a", "b", "c"] and in_flight
    assert set(names[len(names) - len(in_flight) :]) == in_flight
    assert all(one.held_pages == 1 for one in found.decoding)
    assert found.num_running == 3 and not found.waiting
