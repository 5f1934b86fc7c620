"""Decodes leave snapshots: the next turn of a chat begins behind the last answer."""

from functools import partial

import pytest
from support.pipelines import FakePipeline, make_request, new_pipeline, output_when_alone

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.requests import Request

PAGE_SIZE = 4


def pipeline_of(
    interval: int | None,
    *,
    num_state_slots: int = 8,
    num_pages: int = 64,
    num_stages: int = 2,
    **options: object,
) -> FakePipeline:
    args = SchedulingArgs(
        page_size=PAGE_SIZE,
        num_state_slots=num_state_slots,
        track_interval=interval,
        **options,  # type: ignore[arg-type]
    )
    throttle = ThrottleArgs(policy="sarathi", max_prefill_tokens=8, min_prefill_tokens=1)
    return new_pipeline(args, throttle, num_pages=num_pages, num_stages=num_stages)


def prompt_of(length: int, first: int = 1) -> list[int]:
    """One that shares no page with those of another `first`."""
    return [(first + place * place) % 5 if place else first for place in range(length)]


def next_turn(request: Request) -> Request:
    prompt_ids = [*request.prompt_ids, *request.output_ids, 2, 4]
    return make_request(f"{request.request_id} again", prompt_ids, 3)


def place_behind(request: Request, interval: int) -> int:
    """Tokens of `request`, which ran alone, that its next turn need not compute."""
    # The last token was drawn and never computed.
    num_computed, num_prompt = request.num_tokens - 1, len(request.prompt_ids)
    places = [(num_prompt - 1) // PAGE_SIZE * PAGE_SIZE]
    if interval and num_computed // interval * interval >= num_prompt:
        places.append(num_computed // interval * interval)
    if num_computed % PAGE_SIZE == 0:
        places.append(num_computed)
    return max(places)


@pytest.mark.parametrize("interval", [0, 4, 8, 20])
@pytest.mark.parametrize("prompt_length", [1, 3, 4, 5, 8, 13, 16])
def test_the_next_turn_begins_behind_the_answer(prompt_length: int, interval: int) -> None:
    for output_length in range(1, 30):
        pipeline = pipeline_of(interval)
        first = make_request("a", prompt_of(prompt_length), output_length)
        pipeline.scheduler.add(first)
        pipeline.drain()
        second = next_turn(first)
        pipeline.scheduler.add(second)
        pipeline.drain()
        assert second.cached_tokens == place_behind(first, interval)
        assert second.output_ids == output_when_alone(second)
        slots = pipeline.scheduler.state_slots
        assert slots.num_free + slots.num_evictable == slots.num_slots


def test_a_request_has_one_such_slot_and_no_state_is_copied() -> None:
    pipeline = pipeline_of(4, num_stages=1)
    request = make_request("a", prompt_of(3), 40)
    pipeline.scheduler.add(request)
    owned = set()
    while not request.finish:
        pipeline.fill()
        assert len(pipeline.scheduler.state_slots.in_use()) <= 2
        owned.add(request.state_slot)
        pipeline.complete()
        pipeline.scheduler.check_invariants()
    decodes = [chunk for step in pipeline.microbatches for chunk in step.chunks if chunk.is_decode]
    left = [chunk.start for chunk in decodes if chunk.state_source is not None]
    assert left == [*range(4, 42, 4)] and len(owned) == 2
    assert not any(chunk.snapshots for chunk in decodes)


@pytest.mark.parametrize("num_state_slots", [1, 2, 3, 4, 7])
def test_steps_are_what_they_would_be_without(num_state_slots: int) -> None:
    def steps(interval: int) -> tuple[list[list[tuple[str, int, int]]], int]:
        pipeline = pipeline_of(interval, num_state_slots=num_state_slots)
        for number in range(5):
            request = make_request(str(number), prompt_of(5 + number, number), 9 + 3 * number)
            pipeline.scheduler.add(request)
        pipeline.drain()
        chunks = [step.chunks for step in pipeline.microbatches]
        num_left = sum(
            one.is_decode and one.state_source is not None for two in chunks for one in two
        )
        return [
            [(one.request.request_id, one.start, one.length) for one in step] for step in chunks
        ], num_left

    without, num_left = steps(0)
    assert num_left == 0
    with_interval, num_left = steps(4)
    assert with_interval == without
    assert (num_left > 0) == (num_state_slots > 1)


def test_a_newcomer_takes_the_slot_of_one_that_is_held() -> None:
    pipeline = pipeline_of(4, num_state_slots=2, num_stages=1)
    first, second = make_request("a", prompt_of(3), 30), make_request("b", prompt_of(3, 2), 30)
    pipeline.scheduler.add(first)
    for _ in range(9):
        pipeline.fill()
        pipeline.complete()
    slots = pipeline.scheduler.state_slots
    assert (slots.num_free, slots.num_evictable) == (0, 1)
    pipeline.scheduler.add(second)
    pipeline.fill()
    assert {first.state_slot, second.state_slot} == {0, 1} and not slots.num_evictable
    pipeline.drain()
    for request in (first, second):
        assert request.output_ids == output_when_alone(request)


def test_one_that_a_waiting_request_wants_does_not_give_way_to_it() -> None:
    pipeline = pipeline_of(4, num_state_slots=2, num_stages=1, max_running_requests=1)
    first, other = make_request("a", prompt_of(9), 9), make_request("b", prompt_of(3, 2), 30)
    pipeline.scheduler.add(first)
    pipeline.drain()
    pipeline.scheduler.add(other)
    pipeline.fill()
    again = next_turn(first)
    pipeline.scheduler.add(again)
    pipeline.drain()
    assert again.cached_tokens == place_behind(first, 4) == 16
    assert again.output_ids == output_when_alone(again)


def test_a_request_gives_up_its_prompts_snapshot_before_those_of_others() -> None:
    pipeline = pipeline_of(4, num_state_slots=3, num_stages=1)
    first, second = make_request("a", prompt_of(9), 9), make_request("b", prompt_of(9, 2), 9)
    for request in (first, second):
        pipeline.scheduler.add(request)
        pipeline.drain()
    again = [next_turn(request) for request in (first, second)]
    for request in again:
        pipeline.scheduler.add(request)
        pipeline.drain()
    assert [one.cached_tokens for one in again] == [16, 16]


def test_a_retracted_request_goes_on_behind_what_it_left() -> None:
    pipeline = pipeline_of(4, num_stages=1, max_running_requests=1, preemption_threshold=0)
    low, high = make_request("a", prompt_of(3), 20), make_request("b", [4], 2, priority=5)
    pipeline.scheduler.add(low)
    for _ in range(12):
        pipeline.fill()
        pipeline.complete()
    assert low.num_computed == 14
    pipeline.scheduler.add(high)
    pipeline.drain()
    assert low.num_retractions == 1 and low.output_ids == output_when_alone(low)
    chunks = [one for step in pipeline.microbatches for one in step.chunks if one.request is low]
    (resumed,) = (one for one in chunks if not one.is_decode and one.start > 0)
    assert resumed.start == 12 and resumed.state_source is not None


def test_the_interval_is_sglangs_in_whole_pages() -> None:
    with_states = partial(SchedulingArgs, num_state_slots=1)
    assert with_states().snapshot_interval == 256
    assert with_states(page_size=24).snapshot_interval == 264
    assert with_states(page_size=24, track_interval=48).snapshot_interval == 48
    assert with_states(track_interval=0).snapshot_interval == 0
    assert SchedulingArgs(track_interval=48).snapshot_interval == 0
    assert with_states(radix_cache=False).snapshot_interval == 0
    with pytest.raises(ConfigurationError, match="--mamba-track-interval 40 must be a multiple of"):
        SchedulingArgs(page_size=16, track_interval=40)
