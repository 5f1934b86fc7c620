"""A text's tokens are those that a model would write it in behind other text."""

import numpy as np
import pytest
from support.front_model import byte_tokenizer
from support.grammars import vocabulary

from sgl_pipeline.managers.grammars.text_tokens import MAX_TEXTS, MOST_ALLOWED, TextTokens

TOKENS = [b" ", b"\0", b"a", b"b", b"ab", b"\0a", b"abc", b"abd", b"<end>", b"a"]
TOKENS += [b"%d" % number for number in range(200)]


def text_tokens(*token_ids: int) -> TextTokens:
    """Of a tokenizer that gives these ids for every text. Token 8 stands for no text."""
    return TextTokens(lambda text: token_ids, lambda: TOKENS, frozenset({8}))


@pytest.mark.parametrize(
    ("allowed", "text", "goes_on"),
    [
        ([b"ab"], b"ab", True),
        ([b"a", b"ab", b"abc"], b"abc", True),
        # What follows ab is open.
        ([b"a", b"ab", b"abc", b"abd"], b"ab", False),
        ([b"abc", b"abd"], b"ab", False),
        ([b"a", b"b"], b"", False),
        # The text may be over.
        ([b"a", b"<end>"], b"", False),
        ([], b"", False),
        # With every number below 100 and more: 1, 10 to 19, 100 to 150.
        ([b"%d" % number for number in range(150) if f"{number}"[0] == "1"], b"1", False),
        ([b"%d" % number for number in range(160) if f"{number}"[0] == "1"], b"", False),
    ],
)
def test_forced_text_is_what_all_allowed_tokens_share(
    allowed: list[bytes], text: bytes, goes_on: bool
) -> None:
    mask = np.zeros(-(-len(TOKENS) // 32), np.int32)
    for token, of_token in enumerate(TOKENS):
        if of_token in allowed:
            mask.view(np.uint32)[token // 32] |= 1 << token % 32
    assert text_tokens().forced_by(mask) == (text, goes_on)
    assert (len(allowed) > MOST_ALLOWED) == (len(allowed) == 71)


def test_tokens_are_those_of_the_models_tokenizer() -> None:
    for text in ("name", '": "', "ü\n", "<f>"):
        assert vocabulary().text_tokens.of(text.encode()) == tuple(byte_tokenizer().encode(text))


def test_parts_of_characters_at_the_ends_do_not_count() -> None:
    inside = "üöä".encode()[1:-1]
    assert vocabulary().text_tokens.of(inside) == tuple(byte_tokenizer().encode("ö"))
    assert vocabulary().text_tokens.of(inside[:1]) == ()


def test_a_space_that_a_tokenizer_puts_before_each_text_does_not_count() -> None:
    assert text_tokens(0, 1, 4).of(b"ab") == (4,)
    assert text_tokens(0, 1, 2, 3).of(b"ab") == (2, 3)


def test_text_that_is_one_token_with_what_stands_before_it_has_none() -> None:
    assert text_tokens(0, 5, 3).of(b"ab") == ()


def test_other_text_has_none() -> None:
    """A tokenizer may change a text, as by lower case."""
    assert text_tokens(1, 4).of(b"AB") == ()
    assert text_tokens().of(b"ab") == ()


A, B, AB, ABC = (TOKENS.index(text) for text in (b"a", b"b", b"ab", b"abc"))


def test_a_text_is_written_as_it_was_before() -> None:
    tokens = text_tokens(0, 1, AB)
    assert tokens.of(b"ab") == (AB,)
    assert tokens.note(b"ab", A) == b"b"
    assert tokens.note(b"b", B) == b""
    assert tokens.of(b"ab") == (A, B)
    # Behind what is known the tokenizer says the rest, here that of any text.
    assert tokens.note(b"aab", A) == b"ab"
    assert tokens.of(b"aab") == (A, A, B)


def test_a_token_may_go_beyond_its_text() -> None:
    tokens = text_tokens(0, 1, AB)
    assert tokens.note(b"ab", ABC) == b""
    assert tokens.of(b"ab") == (ABC,)


def test_a_token_that_does_not_begin_a_text_says_nothing_of_it() -> None:
    tokens = text_tokens(0, 1, AB)
    assert tokens.note(b"ab", B) == tokens.note(b"ab", TOKENS.index(b"10")) == b""
    assert tokens.of(b"ab") == (AB,)


def test_the_token_that_was_drawn_more_often_is_the_likely_one() -> None:
    tokens = text_tokens(0, 1, AB)
    for drawn, likely in ((AB, AB), (AB, AB), (A, AB), (A, A), (AB, AB), (AB, AB), (A, AB)):
        tokens.note(b"ab", drawn)
        assert tokens.of(b"ab")[0] == likely


def test_the_texts_that_were_noted_last_are_kept() -> None:
    tokens = text_tokens(0, 1, AB)
    for number in range(MAX_TEXTS + 1):
        tokens.note(b"a%d" % number, A)
        tokens.note(b"ab", A)
    assert len(tokens._first_tokens) == MAX_TEXTS
    assert b"ab" in tokens._first_tokens and b"a0" not in tokens._first_tokens


def test_the_bytes_of_all_tokens_are_asked_for_once() -> None:
    asked: list[int] = []

    def all_bytes() -> list[bytes]:
        asked.append(1)
        return TOKENS

    tokens = TextTokens(lambda text: (1, AB), all_bytes, frozenset())
    tokens.prepare()
    assert asked == [1]
    assert tokens.of(b"ab") == (AB,)
    assert asked == [1]


def test_a_text_is_encoded_once() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [1, *[2] * (len(text) - 1)]

    tokens = TextTokens(encode, lambda: TOKENS, frozenset())
    assert tokens.of(b"aaa") == tokens.of(b"aaa") == (2, 2, 2)
    assert asked == ["\0aaa"]
