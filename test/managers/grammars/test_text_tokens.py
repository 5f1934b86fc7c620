"""A text's tokens are those that a model would write it in behind other text."""

from support.front_model import byte_tokenizer
from support.grammars import vocabulary

from sgl_pipeline.managers.grammars.text_tokens import MAX_CHARACTERS, TextTokens

TOKENS = [b" ", b"\0", b"a", b"b", b"ab", b"\0a"]


def text_tokens(*token_ids: int) -> TextTokens:
    """Of a tokenizer that gives these ids for every text."""
    return TextTokens(lambda text: token_ids, lambda: TOKENS)


def test_tokens_are_those_of_the_models_tokenizer() -> None:
    for text in ("name", '": "', "ü\n", "<f>"):
        assert vocabulary().text_tokens.of(text) == tuple(byte_tokenizer().encode(text))


def test_a_space_that_a_tokenizer_puts_before_each_text_does_not_count() -> None:
    assert text_tokens(0, 1, 4).of("ab") == (4,)
    assert text_tokens(0, 1, 2, 3).of("ab") == (2, 3)


def test_text_that_is_one_token_with_what_stands_before_it_has_none() -> None:
    assert text_tokens(0, 5, 3).of("ab") == ()


def test_other_text_has_none() -> None:
    """A tokenizer may change a text, as by lower case."""
    assert text_tokens(1, 4).of("AB") == ()
    assert text_tokens().of("ab") == ()


def test_a_long_text_is_cut_and_a_text_is_encoded_once() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [1, *[2] * (len(text) - 1)]

    tokens = TextTokens(encode, lambda: TOKENS)
    assert tokens.of("a" * 1_000) == tokens.of("a" * 900) == (2,) * MAX_CHARACTERS
    assert asked == ["\0" + "a" * MAX_CHARACTERS]
