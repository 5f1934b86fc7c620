"""A draft is forced text, and what is guessed and allowed between two such texts."""

from collections.abc import Mapping, Sequence

import pytest

from sgl_pipeline.requests import FinishReason
from sgl_pipeline.scheduling.grammar_drafts import Draft, DraftKind, grammar_draft, guessed

# What is forced at the beginning and after each of these tokens; tokens from 50 on are refused.
FORCED = {0: (1, 2, 3), 7: (8, 9), 6: (60, 61)}
REFUSED = 50


class ScriptedGrammar:
    """Forces what FORCED says."""

    def __init__(self) -> None:
        self.tried: list[int] = []

    def allowed_tokens_masks(self, draft_ids: Sequence[int] = ()) -> list[bytes]:
        raise AssertionError("drafts need no masks")

    def accept(self, token_id: int) -> FinishReason | None:
        raise AssertionError("drafts are no output")

    def forced_tokens(self) -> tuple[int, ...]:
        return FORCED.get([0, *self.tried][-1], ())

    def try_token(self, token_id: int) -> bool:
        if token_id >= REFUSED:
            return False
        self.tried.append(token_id)
        return True

    def take_back(self) -> None:
        self.tried.clear()


def draft_of(most: int, guesses: Mapping[int, int]) -> Draft:
    """The draft where `guesses` says what follows each token."""
    grammar = ScriptedGrammar()
    draft = grammar_draft(grammar, most, lambda after: guesses.get([0, *after][-1]))
    assert grammar.tried == []
    return draft


@pytest.mark.parametrize(
    ("guesses", "token_ids", "kinds"),
    [
        ({}, (1, 2, 3), "FFE"),
        # A guess goes before the end of the forced text, if it is allowed.
        ({2: 30}, (1, 2, 30), "FFG"),
        ({2: 50}, (1, 2, 3), "FFE"),
        ({2: 3, 3: 7}, (1, 2, 3, 7, 8, 9), "FFGGFE"),
        ({3: 51}, (1, 2, 3), "FFE"),
        # Forced text in tokens that the grammar refuses ends the draft.
        ({3: 6, 6: 4}, (1, 2, 3, 6), "FFEG"),
    ],
)
def test_guesses_stand_between_forced_texts(
    guesses: Mapping[int, int], token_ids: tuple[int, ...], kinds: str
) -> None:
    draft = draft_of(20, guesses)
    assert draft.token_ids == token_ids
    assert "".join(kind.name[0] for kind in draft.kinds) == kinds


@pytest.mark.parametrize("most", range(8))
def test_a_draft_has_no_more_tokens_than_asked_for(most: int) -> None:
    longest = draft_of(20, {3: 7})
    assert draft_of(most, {3: 7}) == longest.first(most)
    assert len(longest.token_ids) == 6


def test_a_loop_of_guesses_ends_with_the_draft() -> None:
    assert draft_of(9, {3: 4, 4: 5, 5: 4}).token_ids == (1, 2, 3, 4, 5, 4, 5, 4, 5)


def test_a_draft_of_guesses_alone() -> None:
    assert guessed([5, 6]) == Draft((5, 6), (DraftKind.GUESS, DraftKind.GUESS))
