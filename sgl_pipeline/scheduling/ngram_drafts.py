"""Drafts of a request's next tokens, looked up in its own prompt and output.

Where the newest tokens have occurred before, what followed them then is likely to follow again:
prompt lookup. A draft is a guess that the stages check, so that a wrong one costs time and never
changes a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from sgl_pipeline.requests import Request


@dataclass(frozen=True, slots=True)
class NgramRange:
    """The lengths of the n-grams that are looked up: `longest` first, down to `shortest`."""

    shortest: int
    longest: int

    def __post_init__(self) -> None:
        assert 1 <= self.shortest <= self.longest


class NgramIndex:
    """The n-grams of one request, each with its latest place.

    The index never forgets the latest `capacity` tokens, and knows at most twice as many: it has
    two generations, and when the young one is full, the old one is dropped. A token costs one entry
    for each length, about 100 bytes.
    """

    def __init__(self, request: Request, lengths: NgramRange, capacity: int) -> None:
        self._request = request
        self._lengths = lengths
        self._capacity = capacity
        # By length, the longest first: from the hash of an n-gram to the position after it. Two
        # n-grams of one hash would make a bad draft and nothing worse.
        self._young = self._empty()
        self._old = self._empty()
        self._num_indexed = 0

    def catch_up(self) -> None:
        """Enters the tokens that are new since the last call, without the newest, which nothing
        follows yet. Each costs a constant time."""
        end = self._request.num_tokens - 1
        while self._num_indexed < end:
            full_at = self._num_indexed // self._capacity * self._capacity + self._capacity
            if self._num_indexed % self._capacity == 0:
                self._old, self._young = self._young, self._empty()
            self._enter(min(end, full_at))

    def draft(self, num_tokens: int) -> tuple[int, ...]:
        """The `num_tokens` tokens that are likely to follow: those after the latest place of the
        longest n-gram that has occurred before. Empty where none has.

        Where that place is closer to the end, its tokens repeat: a loop goes on as a loop.
        """
        end = self._request.num_tokens
        follower = self._follower(())
        if follower is None:
            return ()
        followers = self._request.tokens(follower, min(end, follower + num_tokens))
        return tuple(islice(cycle(followers), num_tokens))

    def next_token(self, after: Sequence[int]) -> int | None:
        """The token that is likely to follow if `after` are the request's next ones; None where no
        n-gram at their end has occurred before."""
        follower = self._follower(after)
        return None if follower is None else self._request.tokens(follower, follower + 1)[0]

    def _follower(self, after: Sequence[int]) -> int | None:
        """The position after the latest place of the longest n-gram that the request with `after`
        ends with."""
        self.catch_up()
        end, longest = self._request.num_tokens, self._lengths.longest
        newest = [*self._request.tokens(max(0, end - longest), end), *after][-longest:]
        for length, young in self._young.items():
            if length <= len(newest):
                ngram = hash(tuple(newest[-length:]))
                follower = young.get(ngram, self._old[length].get(ngram))
                if follower is not None:
                    return follower
        return None

    def _enter(self, end: int) -> None:
        """Enters the n-grams that end with the tokens up to position `end` (exclusive)."""
        for length, followers in self._young.items():
            begin = max(0, self._num_indexed - length + 1)
            tokens = self._request.tokens(begin, end)
            num_ngrams = max(0, len(tokens) - length + 1)
            columns = [tokens[offset : offset + num_ngrams] for offset in range(length)]
            ngrams = map(hash, zip(*columns, strict=True))
            followers.update(zip(ngrams, range(begin + length, end + 1), strict=True))
        self._num_indexed = end

    def _empty(self) -> dict[int, dict[int, int]]:
        lengths = range(self._lengths.longest, self._lengths.shortest - 1, -1)
        return {length: {} for length in lengths}
