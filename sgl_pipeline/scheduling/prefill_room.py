"""Limits the length of one step's chunks by tokens and, where the budget has a time limit, by time.

It sees no request and no page.
"""

from collections.abc import Sequence
from dataclasses import replace

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.step_work import StepWork, attended_tokens
from sgl_pipeline.throttle import TimeLimit, TokenBudget

# A rest of a prompt goes along with the chunk before it when it is at most this long, and at most
# an eighth of that chunk: a step of its own would read all weights for it. By this much, and once a
# step, the prefill budget may be exceeded.
MAX_TAIL_TOKENS = 16
# Of the least prefill tokens. With all of them the steps of slow stages, of some sixty rows, would
# differ by a quarter, and the stages idle for it.
LEAST_CUT_SHARE = 0.25


class PrefillRoom:
    """The rest of a step's budget, chunk by chunk.

    Args:
        decodes: the chunks that the step already has.
    """

    def __init__(self, budget: TokenBudget, decodes: Sequence[Chunk]) -> None:
        self._left_tokens = budget.prefill_tokens
        self._limit = budget.time
        self._is_cut = False
        self._least_tokens = 0
        if self._limit is not None:
            self._least_tokens = self._limit.least_prefill_tokens
            rows = len(decodes)
            attended = sum([chunk.start + 1 for chunk in decodes if chunk.request.lease is None])
            self._work = StepWork(rows, rows, attended, 0, rows)

    @property
    def is_open(self) -> bool:
        """True if another chunk may be asked for."""
        if self._is_cut or self._left_tokens <= 0:
            return False
        return self._limit is None or self._least_tokens > 0 or self._fits(self._limit, 0, 1)

    def chunk_length(self, start: int, remaining: int) -> int:
        """The longest chunk from position `start` of a prompt of which `remaining` tokens are left;
        0 where there is no room. A tiny rest rides along.

        If the time limit cuts a prompt, the step is full. Beside other prompts a cut one has at
        least a quarter of the least prefill tokens, or none: further and tiny chunks would cost
        more than they fill.
        """
        if not self.is_open:
            return 0
        length = min(self._left_tokens, remaining)
        if self._limit is not None and not self._fits(self._limit, start, length):
            self._is_cut = True
            least = min(self._limit.least_prefill_tokens, length)
            longest = self._longest(self._limit, start, length)
            is_worth_it = longest >= least * LEAST_CUT_SHARE
            length = longest if is_worth_it else 0
            length = max(length, min(self._least_tokens, least))
        return with_tiny_tail(length, remaining)

    def stretch(self, start: int, length: int) -> None:
        """Makes room for the `length` tokens from position `start` with which a newcomer's prompt
        ends, where `newcomer_ms` allows it."""
        limit = self._limit
        if limit is None or length > self._left_tokens:
            return
        whole_ms = limit.times.step_ms(self._with_chunk(start, length, False))
        if limit.step_ms < whole_ms <= limit.newcomer_ms:
            self._limit = replace(limit, step_ms=whole_ms)

    def take(self, start: int, length: int, samples: bool) -> None:
        """Counts a chunk of the step."""
        self._left_tokens -= length
        self._least_tokens = 0
        if self._limit is not None:
            self._work = self._with_chunk(start, length, samples)

    def _with_chunk(self, start: int, length: int, samples: bool) -> StepWork:
        tokens, decodes, by_decodes, by_prefill, rows = self._work
        by_prefill += attended_tokens(start, start + length)
        return StepWork(tokens + length, decodes, by_decodes, by_prefill, rows + samples)

    def _fits(self, limit: TimeLimit, start: int, length: int) -> bool:
        work = self._with_chunk(start, length, False)
        return limit.times.step_ms(work) <= limit.step_ms

    def _longest(self, limit: TimeLimit, start: int, too_long: int) -> int:
        """The most tokens that fit, by halving: time never falls with the length."""
        fitting = 0
        while too_long - fitting > 1:
            middle = (fitting + too_long) // 2
            if self._fits(limit, start, middle):
                fitting = middle
            else:
                too_long = middle
        return fitting


def with_tiny_tail(left_tokens: int, remaining_tokens: int) -> int:
    """A chunk's length within `left_tokens`, a tiny rest of the prompt taken along."""
    length = min(left_tokens, remaining_tokens)
    rest = remaining_tokens - length
    return remaining_tokens if rest <= min(MAX_TAIL_TOKENS, length // 8) else length
