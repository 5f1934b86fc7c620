import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.sampling.sampling_params import SamplingParams
from support.front_model import byte_tokenizer

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.upstream.stop_regex import _MAX_WORK, StopRegexes

REFUSED: dict[str, tuple[Any, str]] = {
    "not closed": ("(", "missing )"),
    "look-ahead": ("a(?=b)", "look-around"),
    "look-behind": ("(?<=a)b", "look-around"),
    "a back-reference": (r"(a)\1", "back-references"),
    "an explosion": ("(a{1000}){1000}", "repetition"),
    "a count without minimum": ("a{,3}", "{0,n}"),
    "an explosion of a Unicode class": (r"\pL{200}", "too large"),
    "RE2's syntax, not Python's": (r"\pL", "bad escape"),
    "half a surrogate pair": ("\ud800", "surrogate"),
    "too costly": ("(?:a|b)*a[ab]{900}", "too costly"),
    "too long": ("a" * 257, "256 bytes"),
    "too deep": ("(" * 100_000, "256 bytes"),
    "too many": (["a"] * 33, "at most 32"),
    "empty": ([""], "empty"),
    "no text": ([1], "list of strings"),
    "an object": ({"a": "b"}, "list of strings"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_matched_is_refused_with_the_reason(name: str) -> None:
    asked, words = REFUSED[name]
    with pytest.raises(RequestError, match=re.escape(words)):
        StopRegexes(asked)


def test_an_expression_that_would_backtrack_for_ever_is_an_ordinary_one() -> None:
    assert StopRegexes("(a+)+$").first_match("a" * 5000 + "b", 0) is None
    assert StopRegexes("(a+)+$").first_match("a" * 5000, 0) == "(a+)+$"


@given(st.text(alphabet="ab(){}[]|*+?1,\\^$.", max_size=24))
def test_what_is_taken_is_taken_by_upstream_and_costs_no_more_than_the_limit(asked: str) -> None:
    try:
        regexes = StopRegexes(asked)
    except RequestError:
        return
    SamplingParams(stop_regex=asked).normalize(byte_tokenizer())
    work = sum(one.programsize for one in regexes._compiled)
    assert work * (regexes.window_characters - 1) <= _MAX_WORK
