import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.front_model import byte_tokenizer

from sgl_pipeline.managers.stop_strings import StopStringCheck
from sgl_pipeline.requests import FinishReason

TOKENIZER = byte_tokenizer()


def first_stop(text: str, *stops: str) -> tuple[int, FinishReason] | None:
    """Feeds `text` a token (a byte) at a time; where the check stopped, and why."""
    check = StopStringCheck(TOKENIZER, stops)
    ids = TOKENIZER.encode(text)
    for length in range(1, len(ids) + 1):
        if (reason := check(ids[:length])) is not None:
            return length, reason
    return None


def test_stops_at_the_token_that_completes_a_stop_string() -> None:
    assert first_stop("one two three", "two") == (7, FinishReason("stop", matched="two"))


def test_text_without_a_stop_string_never_stops() -> None:
    assert first_stop("one tw three", "two", "four") is None


def test_a_stop_string_outside_ascii_is_found_across_its_bytes() -> None:
    assert first_stop("a→b", "→") == (4, FinishReason("stop", matched="→"))


def test_ascii_before_half_a_character_is_found_at_once() -> None:
    check = StopStringCheck(TOKENIZER, ("ab",))
    ids = TOKENIZER.encode("ab→")
    assert check(ids[:1]) is None
    assert check(ids[:3]) == FinishReason("stop", matched="ab")


def test_bytes_that_are_no_text_do_not_hide_a_later_stop() -> None:
    half_character = TOKENIZER.encode("→")[:1]
    check = StopStringCheck(TOKENIZER, ("end",))
    ids = half_character * 9 + TOKENIZER.encode("end")
    reasons = [check(ids[:length]) for length in range(1, len(ids) + 1)]
    assert reasons[-1] == FinishReason("stop", matched="end")


def test_the_earliest_match_wins_and_the_longer_of_two() -> None:
    # One token that completes both: the check is fed several tokens at once.
    check = StopStringCheck(TOKENIZER, ("cd", "bc", "bcd"))
    assert check(TOKENIZER.encode("abcd")) == FinishReason("stop", matched="bcd")


@pytest.mark.parametrize(
    ("text", "partial"), [("on", False), ("one st", True), ("one sto", True), ("one sty", False)]
)
def test_a_beginning_of_a_stop_string_holds_a_stream_back(text: str, partial: bool) -> None:
    check = StopStringCheck(TOKENIZER, ("stop",))
    check(TOKENIZER.encode(text))
    assert check.ends_in_partial_match is partial


@given(
    text=st.text(alphabet="ab→", max_size=30),
    stops=st.lists(st.text(alphabet="ab→", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stops_exactly_when_the_whole_text_first_holds_a_stop(text: str, stops: list[str]) -> None:
    ids = TOKENIZER.encode(text)
    expected = None
    for length in range(1, len(ids) + 1):
        so_far = TOKENIZER.decode(ids[:length])
        if any(stop in so_far for stop in stops):
            expected = length
            break
    stopped = first_stop(text, *stops)
    assert (stopped and stopped[0]) == expected
    if stopped is not None:
        assert stopped[1].matched in TOKENIZER.decode(ids[: stopped[0]])
