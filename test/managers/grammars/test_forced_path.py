"""An output teaches how forced texts are written, wherever it gets to one."""

import pytest

from sgl_pipeline.managers.grammars.forced_path import ForcedPath
from sgl_pipeline.managers.grammars.text_tokens import TextTokens

TOKENS = [b"\0", b"a", b"b", b"ab", b'":', b"x"]
ANCHOR, A, B, AB, COLON, X = range(len(TOKENS))


@pytest.fixture
def tokens() -> TextTokens:
    """Writes `ab` as one token, until it has seen otherwise."""
    return TextTokens(lambda text: (ANCHOR, AB), lambda: TOKENS, frozenset())


def test_a_text_behind_the_output(tokens: TextTokens) -> None:
    path = ForcedPath(tokens)
    path.forces(b"ab", 0)
    path.tries(AB, 0)
    path.takes(A)
    path.takes(B)
    assert tokens.of(b"ab") == (A, B)


def test_a_text_behind_tokens_that_were_tried_and_taken(tokens: TextTokens) -> None:
    path = ForcedPath(tokens)
    path.tries(X, 0)
    path.forces(b"ab", 1)
    path.tries(AB, 1)
    path.takes(X)
    path.takes(A)
    path.takes(B)
    assert tokens.of(b"ab") == (A, B)


def test_a_text_that_the_output_does_not_get_to(tokens: TextTokens) -> None:
    path = ForcedPath(tokens)
    path.tries(X, 0)
    path.forces(b"ab", 1)
    path.takes(COLON)
    path.takes(A)
    assert tokens.of(b"ab") == (AB,)


def test_tokens_that_are_tried_anew_forget_those_before(tokens: TextTokens) -> None:
    path = ForcedPath(tokens)
    path.tries(X, 0)
    path.forces(b"ab", 1)
    path.tries(COLON, 0)
    path.takes(COLON)
    path.takes(A)
    assert tokens.of(b"ab") == (AB,)
    path.forces(b"ab", 0)
    path.takes(A)
    assert tokens.of(b"ab")[0] == A


def test_the_rest_of_a_text_is_forced_though_nothing_was_tried(tokens: TextTokens) -> None:
    path = ForcedPath(tokens)
    path.forces(b'ab":', 0)
    path.takes(A)
    path.takes(B)
    path.takes(COLON)
    path.takes(A)
    assert tokens.of(b'ab":') == (A, B, COLON)
    assert tokens.of(b"ab") == (AB,)
