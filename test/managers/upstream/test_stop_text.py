import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.front_model import byte_tokenizer

from sgl_pipeline.managers.upstream.stop_regex import StopRegexes
from sgl_pipeline.managers.upstream.stop_text import StopTextCheck
from sgl_pipeline.requests import FinishReason

TOKENIZER = byte_tokenizer()


def text_check(*stops: str, regex: str | list[str] | None = None) -> StopTextCheck:
    return StopTextCheck(TOKENIZER, stops, StopRegexes(regex or []))


def first_stop(
    text: str, *stops: str, regex: str | list[str] | None = None
) -> tuple[int, FinishReason] | None:
    """Feeds `text` a token (a byte) at a time; where the check stopped, and why."""
    check = text_check(*stops, regex=regex)
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
    check = text_check("ab")
    ids = TOKENIZER.encode("ab→")
    assert check(ids[:1]) is None
    assert check(ids[:3]) == FinishReason("stop", matched="ab")


def test_bytes_that_are_no_text_do_not_hide_a_later_stop() -> None:
    half_character = TOKENIZER.encode("→")[:1]
    check = text_check("end")
    ids = half_character * 9 + TOKENIZER.encode("end")
    reasons = [check(ids[:length]) for length in range(1, len(ids) + 1)]
    assert reasons[-1] == FinishReason("stop", matched="end")


def test_of_several_the_first_named_wins_and_strings_before_expressions() -> None:
    # One token that completes all: the check is fed several tokens at once.
    ids = TOKENIZER.encode("abcd")
    assert text_check("x", "cd", "bc")(ids) == FinishReason("stop", matched="cd")
    assert text_check("cd", regex="b.")(ids) == FinishReason("stop", matched="cd")
    assert text_check("x", regex=["y", "c", "b"])(ids) == FinishReason("stop", matched="c")


@pytest.mark.parametrize(
    ("text", "partial"), [("on", False), ("one st", True), ("one sto", True), ("one sty", False)]
)
def test_a_beginning_of_a_stop_string_holds_a_stream_back(text: str, partial: bool) -> None:
    check = text_check("stop")
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


@pytest.mark.parametrize(
    ("text", "regex", "length"),
    [
        ("one two", "o|w", 1),
        ("one two", r"\bt\w", 6),
        ("Yes. No", r"[.!?]\s*$", 4),
        ("x = 10", "[0-9]{2}", 6),
        ("a→b", "→", 4),
        ("aab", "^b|^ab", None),
        ("b" * 40 + "cb", "^c|cb", 42),
        ("b" * 40 + "c" + "b" * 40, "^c|xy", None),
        ("<t>" + "long " * 500 + "</t>", "<t>.*</t>", 2507),
    ],
)
def test_an_expression_stops_at_the_token_that_completes_it(
    text: str, regex: str, length: int | None
) -> None:
    expected = None if length is None else (length, FinishReason("stop", matched=regex))
    assert first_stop(text, regex=regex) == expected


# Pieces with the same meaning to RE2 and to Python over the text's alphabet.
PIECES = st.sampled_from(
    ["a", "b", ".", "[ab]", "[^b]", "^", "$", r"\b", "a+", "b*", "b{2,3}?", "→"]
)
EXPRESSIONS = st.recursive(
    PIECES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
    ),
    max_leaves=6,
)


@given(text=st.text(alphabet="ab ", max_size=30), regex=EXPRESSIONS)
def test_an_expression_stops_when_pythons_search_of_the_whole_text_would(
    text: str, regex: str
) -> None:
    expected = next((n for n in range(1, len(text) + 1) if re.search(regex, text[:n])), None)
    stopped = first_stop(text, regex=regex)
    assert (stopped and stopped[0]) == expected


def test_a_stream_does_not_wait_for_an_expression() -> None:
    check = text_check(regex="stop")
    check(TOKENIZER.encode("sto"))
    assert not check.ends_in_partial_match
