"""Pages that are kept for others: they count as used, and come back."""

import pytest
from support.pipelines import FakePipeline, make_request, new_pipeline


def served(num_pages: int) -> FakePipeline:
    """A pipeline whose cache has a prompt of 16 tokens, four pages."""
    pipeline = new_pipeline(num_pages=num_pages, num_stages=1)
    pipeline.scheduler.add(make_request("first", range(16), max_new_tokens=1))
    pipeline.drain()
    return pipeline


def free_pages(pipeline: FakePipeline) -> int:
    pipeline.scheduler.check_invariants()
    return pipeline.scheduler.load().free_pages


def test_a_held_prefix_is_used_and_not_evicted() -> None:
    pipeline = served(num_pages=8)
    held = pipeline.scheduler.kept_pages
    end = held.hold(list(range(16)), "")
    assert (held.num_pages, free_pages(pipeline)) == (4, 4)
    # It needs all other pages, and leaves the held ones.
    pipeline.scheduler.add(make_request("other", range(100, 113), max_new_tokens=1))
    pipeline.drain()
    pipeline.scheduler.add(again := make_request("again", range(17), max_new_tokens=1))
    pipeline.drain()
    assert again.cached_tokens == 16
    held.let_go(end)
    assert (held.num_pages, free_pages(pipeline)) == (0, 8)


def test_a_prefix_can_be_held_twice_and_only_what_is_cached_is() -> None:
    pipeline = served(num_pages=8)
    held = pipeline.scheduler.kept_pages
    ends = [held.hold(list(range(number)), "") for number in (16, 40, 9)]
    assert [end.end for end in ends] == [16, 16, 8]
    assert (held.num_pages, free_pages(pipeline)) == (10, 4)
    for end in ends:
        held.let_go(end)
    assert (held.num_pages, free_pages(pipeline)) == (0, 8)


def test_pages_are_set_aside_as_far_as_they_can_be_had() -> None:
    pipeline = served(num_pages=8)
    held = pipeline.scheduler.kept_pages
    for number, free in ((3, 5), (3, 5), (1, 7), (20, 0), (0, 8)):
        held.set_aside(number)
        assert free_pages(pipeline) == free


@pytest.mark.parametrize("aside", [0, 2, 4])
def test_what_is_aside_is_not_given_out(aside: int) -> None:
    pipeline = new_pipeline(num_pages=8, num_stages=1)
    pipeline.scheduler.kept_pages.set_aside(aside)
    for number in range(3):
        prompt = range(100 * number, 100 * number + 8)
        pipeline.scheduler.add(make_request(str(number), prompt, max_new_tokens=4))
    for _ in range(40):
        pipeline.fill()
        assert 8 - aside >= sum(len(one.pages) for one in pipeline.scheduler.requests())
        if not pipeline.steps_in_flight:
            break
        pipeline.complete()
    assert pipeline.scheduler.is_idle
