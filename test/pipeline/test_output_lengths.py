"""Recent answers say how long the next ones will be, those under way among them."""

import pytest

from sgl_pipeline.pipeline.output_lengths import OutputLengths

MOST = 1000


def test_without_an_end_every_answer_may_draw_all() -> None:
    lengths = OutputLengths([], [5, 9])
    assert lengths.num_ended == 0
    assert lengths.left(0, MOST, 0.5) == MOST and lengths.left(30, 40, 0.1) == 10


@pytest.mark.parametrize(
    ("share", "left"), [(0.05, 10), (0.25, 30), (0.55, 60), (0.95, 100), (0.999, 100)]
)
def test_shares_of_answers_that_all_ended(share: float, left: int) -> None:
    assert OutputLengths(range(10, 101, 10), []).left(0, MOST, share) == left


def test_what_was_drawn_rules_shorter_answers_out() -> None:
    lengths = OutputLengths([10, 20, 30, 40], [])
    assert lengths.left(20, MOST, 0.4) == 10 and lengths.left(20, MOST, 0.6) == 20
    assert lengths.left(20, 25, 0.6) == 5


def test_answers_under_way_make_long_ones_likelier() -> None:
    ended = [10, 20, 30, 40]
    alone, beside = OutputLengths(ended, []), OutputLengths(ended, [25] * 8)
    assert alone.left(0, MOST, 0.6) == 30
    assert beside.left(0, MOST, 0.6) == 40  # 10 of 12 go on to 25, and half of those beyond 30


def test_beyond_the_longest_ends_come_as_often_as_over_all_tokens() -> None:
    lengths = OutputLengths([100], [])
    assert lengths.left(400, MOST, 0.5) == 69  # half-life of an end in 100 tokens
    assert lengths.left(400, 420, 0.5) == 20
