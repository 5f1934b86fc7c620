"""Drafts of requests with a grammar: the text that it forces, and between two such texts what a
drafter guesses and the grammar allows.

Only the end of a forced text is in doubt. A longer token may be drawn there, as `":` for `"`, so
that the drafter's guess goes first.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from sgl_pipeline.requests import TokenConstraint

# The likely token after the given draft, if there is one.
Guess = Callable[[Sequence[int]], int | None]


class DraftKind(IntEnum):
    """The origin of a draft token: guessed, inside a text that a grammar forces, or its end."""

    GUESS = 0
    FORCED = 1
    ENDING = 2


class Draft(NamedTuple):
    """The tokens of a draft, and the kind of each."""

    token_ids: tuple[int, ...] = ()
    kinds: tuple[DraftKind, ...] = ()

    def first(self, count: int) -> "Draft":
        """The first `count` tokens of it."""
        return Draft(self.token_ids[:count], self.kinds[:count])


def guessed(token_ids: Sequence[int]) -> Draft:
    """A draft of guesses alone."""
    return Draft(tuple(token_ids), (DraftKind.GUESS,) * len(token_ids))


def grammar_draft(constraint: TokenConstraint, most: int, guess: Guess) -> Draft:
    """A draft of at most `most` tokens, each of which the grammar allows after those before it.
    `constraint` is as before when this returns."""
    token_ids: list[int] = []
    kinds: list[DraftKind] = []

    def extends(token_id: int | None, kind: DraftKind) -> bool:
        if token_id is None or not constraint.try_token(token_id):
            return False
        token_ids.append(token_id)
        kinds.append(kind)
        return True

    goes_on = True
    while goes_on and len(token_ids) < most:
        *inner, ending = constraint.forced_tokens() or (None,)
        inner = inner[: most - len(token_ids)]
        goes_on = all(extends(token_id, DraftKind.FORCED) for token_id in inner)
        if goes_on and len(token_ids) < most:
            is_guessed = extends(guess(token_ids), DraftKind.GUESS)
            goes_on = is_guessed or extends(ending, DraftKind.ENDING)
    constraint.take_back()
    return Draft(tuple(token_ids), tuple(kinds))
