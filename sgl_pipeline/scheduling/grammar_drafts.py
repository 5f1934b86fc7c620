"""Drafts of requests with a grammar: the text that it forces, and between two such texts what a
drafter guesses and the grammar allows.

Only the end of a forced text is in doubt. A longer token may be drawn there, as `":` for `"`, so
that the drafter's guess goes first.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sgl_pipeline.requests import TokenConstraint

# The likely token after the given draft, if there is one.
Guess = Callable[[Sequence[int]], int | None]


class Draft(NamedTuple):
    """The tokens of a draft; `is_forced` says of each whether it is inside a text that a grammar
    forces."""

    token_ids: tuple[int, ...] = ()
    is_forced: tuple[bool, ...] = ()

    def first(self, count: int) -> "Draft":
        """The first `count` tokens of it."""
        return Draft(self.token_ids[:count], self.is_forced[:count])

    def num_forced(self, count: int) -> int:
        """Number of forced tokens among the first `count`."""
        return sum(self.is_forced[:count])


def guessed(token_ids: Sequence[int]) -> Draft:
    """A draft without a forced token."""
    return Draft(tuple(token_ids), (False,) * len(token_ids))


def grammar_draft(constraint: TokenConstraint, most: int, guess: Guess) -> Draft:
    """A draft of at most `most` tokens, each of which the grammar allows after those before it.
    `constraint` is as before when this returns."""
    token_ids: list[int] = []
    is_forced: list[bool] = []

    def extends(token_id: int | None, forced: bool) -> bool:
        if token_id is None or not constraint.try_token(token_id):
            return False
        token_ids.append(token_id)
        is_forced.append(forced)
        return True

    goes_on = True
    while goes_on and len(token_ids) < most:
        *inner, ending = constraint.forced_tokens() or (None,)
        goes_on = all(extends(token_id, True) for token_id in inner[: most - len(token_ids)])
        if goes_on and len(token_ids) < most:
            goes_on = extends(guess(token_ids), False) or extends(ending, False)
    constraint.take_back()
    return Draft(tuple(token_ids), tuple(is_forced))
