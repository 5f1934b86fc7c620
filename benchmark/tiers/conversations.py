"""The load: conversations whose turns come back after the pool has held others.

Pure functions of their arguments; `turn_clients.py` sends what is planned here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

# Some tokens of a user, by a random source and how many.
TokenSource = Callable[[Random, int], tuple[int, ...]]


def random_tokens(first_id: int, vocab_size: int) -> TokenSource:
    """Ids from `first_id` on, below `vocab_size`, each as likely as another."""
    return lambda rng, count: tuple(rng.randrange(first_id, vocab_size) for _ in range(count))


def tokens_of_text(text_ids: Sequence[int]) -> TokenSource:
    """Runs of a text, from anywhere in it; after its end it begins anew."""

    def draw(rng: Random, count: int) -> tuple[int, ...]:
        start = rng.randrange(len(text_ids))
        return tuple(text_ids[(start + place) % len(text_ids)] for place in range(count))

    return draw


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """The tokens that a user adds to the conversation `session` in its `turn`, from 1 on.

    They are sent not before `at_s` of the load, nor before the turn before is answered.
    """

    session: int
    turn: int
    at_s: float
    user_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """`sessions` of `turns` each. A turn sends the whole conversation: the prompts and answers
    before it, and `user_tokens` more (`first_tokens` in the first). Every answer has
    `output_tokens`.

    The sessions take a turn each before one takes its next, in an order drawn anew for every turn.
    `clients` of them are answered at a time; with a finite `turns_per_s`, turns arrive by a Poisson
    process instead, and as many are answered as have arrived.
    """

    sessions: int = 32
    turns: int = 4
    first_tokens: int = 512
    user_tokens: int = 64
    output_tokens: int = 32
    clients: int = 4
    turns_per_s: float = math.inf
    seed: int = 1

    def prompt_tokens(self, turn: int) -> int:
        """Tokens of the whole conversation as `turn` sends it."""
        return self.first_tokens + (turn - 1) * (self.user_tokens + self.output_tokens)

    @property
    def final_tokens(self) -> int:
        """Tokens of a conversation after its last answer."""
        return self.prompt_tokens(self.turns) + self.output_tokens

    def pool_tokens(self, excess: float, page_size: int) -> int:
        """Tokens, in whole pages, of a pool that all conversations exceed `excess` times."""
        return int(self.sessions * self.final_tokens / excess) // page_size * page_size

    @property
    def most_at_once(self) -> int:
        """Turns that may be under way."""
        return self.clients if math.isinf(self.turns_per_s) else self.sessions

    def planned(self, source: TokenSource) -> list[PlannedTurn]:
        """All turns, in the order in which they are sent."""
        rng, at_s, planned = Random(self.seed), 0.0, []
        for turn in range(1, self.turns + 1):
            for session in rng.sample(range(self.sessions), self.sessions):
                if not math.isinf(self.turns_per_s):
                    at_s += rng.expovariate(self.turns_per_s)
                count = self.first_tokens if turn == 1 else self.user_tokens
                planned.append(PlannedTurn(session, turn, at_s, source(rng, count)))
        return planned

    def returns(self, source: TokenSource) -> list[PlannedTurn]:
        """One turn more of every session, at once."""
        rng, turn = Random(self.seed + 1), self.turns + 1
        order = rng.sample(range(self.sessions), self.sessions)
        return [PlannedTurn(one, turn, 0.0, source(rng, self.user_tokens)) for one in order]

    def without_reuse(self, source: TokenSource) -> list[PlannedTurn]:
        """The same numbers of tokens at the same moments, each turn a session of its own whose
        tokens are all new."""
        rng = Random(self.seed + 2)
        return [
            PlannedTurn(session, 1, one.at_s, source(rng, self.prompt_tokens(one.turn)))
            for session, one in enumerate(self.planned(source))
        ]
