"""A request takes what it would have drawn without drafts, and no token more."""

import pytest

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.requests import GREEDY, FinishReason, Request, StopRules
from sgl_pipeline.scheduling.drawn_tokens import take_drawn

LENGTH = FinishReason("length")


def new_chunk(draft_ids: tuple[int, ...], max_new_tokens: int = 9) -> Chunk:
    stops = StopRules(max_new_tokens, frozenset({0}))
    request = Request("test", [1, 2, 3], GREEDY, stops, output_ids=[4])
    return Chunk(request, 3, 1 + len(draft_ids), True, True, draft_ids)


@pytest.mark.parametrize(
    ("draft_ids", "drawn_ids", "taken"),
    [
        ((), (5,), (5,)),
        ((5, 6), (5, 6, 7), (5, 6, 7)),
        ((5, 6), (5, 8, 7), (5, 8)),
        ((5, 6), (9, 6, 7), (9,)),
        # The second drawn token follows a wrong one, whatever it equals.
        ((5, 6, 7), (8, 6, 7, 1), (8,)),
    ],
)
def test_tokens_up_to_the_first_wrong_draft(
    draft_ids: tuple[int, ...], drawn_ids: tuple[int, ...], taken: tuple[int, ...]
) -> None:
    chunk = new_chunk(draft_ids)
    assert take_drawn(chunk, drawn_ids) == (taken, None)
    assert chunk.request.output_ids == [4, *taken]


def test_a_request_knows_its_drafts() -> None:
    chunk = new_chunk((5, 6))
    counts = chunk.request.drafts
    for drawn_ids in ((5, 6, 7), (5, 8, 7), (9, 6, 7), (9, 9, 9)):
        take_drawn(chunk, drawn_ids)
    assert (counts.steps_by_right, counts.drafted_tokens) == ([2, 1, 1], 8)
    assert (counts.num_steps, counts.accepted_tokens) == (4, 3)
    take_drawn(new_chunk(()), (5,))
    take_drawn(Chunk(chunk.request, 3, 1, True, True), (5,))
    assert counts.num_steps == 4


def test_no_token_after_a_stop_token() -> None:
    chunk = new_chunk((5, 0, 6))
    taken, finish = take_drawn(chunk, (5, 0, 6, 7))
    assert (taken, finish) == ((5, 0), FinishReason("stop", matched=0))
    assert chunk.request.output_ids == [4, 5, 0]


def test_no_token_beyond_the_length() -> None:
    chunk = new_chunk((5, 6, 7), max_new_tokens=3)
    assert take_drawn(chunk, (5, 6, 7, 8)) == ((5, 6), LENGTH)


def test_a_request_for_no_tokens_takes_none() -> None:
    request = Request("test", [1, 2, 3], GREEDY, StopRules(max_new_tokens=0))
    for drawn_ids in ((), (5,)):
        chunk = Chunk(request, 0, 3, is_decode=False, samples=bool(drawn_ids))
        assert take_drawn(chunk, drawn_ids) == ((), LENGTH)
        assert request.output_ids == []


def test_a_chunk_taken_apart_has_one_sampled_row_in_each_part() -> None:
    request = Request("test", [1, 2, 3, 4, 5], GREEDY, StopRules(9))
    chunk = Chunk(request, 2, 5, is_decode=False, samples=True, draft_ids=(6, 7))
    assert [(part.start, part.end) for part in chunk.apart()] == [(2, 5), (5, 6), (6, 7)]
    assert sum(part.num_samples for part in chunk.apart()) == chunk.num_samples == 3
    whole = Chunk(request, 2, 3, is_decode=False, samples=True)
    assert whole.apart() == (whole,)
