"""`TokenConstraint`s by compiled grammars, which restrict the tokens of one request.

They run in the scheduler's loop: the step's encoder asks for masks, the stop rules pass on drawn
tokens. No compile happens here, and the cost of matching is counted: a grammar that is too slow
ends its request, and nothing raises.
"""

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import xgrammar
from sglang.srt.utils.token_sequence_matcher import TokenSequenceMatcher

from sgl_pipeline.requests import FinishReason, TokenConstraint

logger = logging.getLogger(__name__)

# CPU time of matching beyond the limit per token, for a few expensive tokens among cheap ones.
ALLOWANCE_S = 0.25


class GrammarConstraint:
    """Follows the grammar from the first token that it is given.

    When the text is complete only stop tokens are allowed; the grammar's are the model's EOS ids,
    as in SGLang, and one of them ends the request even with `ignore_eos`.

    Args:
        vocab_size: of the model's logits.
        ms_per_token: CPU time that matching may take on average, after ALLOWANCE_S. One call cannot
            be interrupted, but costs of ambiguous grammars grow from token to token.
        clock: CPU seconds of this thread, which a busy machine does not make longer.
    """

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        vocab_size: int,
        ms_per_token: float,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._ms_per_token = ms_per_token
        self._clock = clock
        self._spent_s = 0.0
        self._num_tokens = 0
        self._failure: FinishReason | None = None

    def allowed_tokens_mask(self) -> bytes:
        """See `requests.TokenConstraint`. After a failure, which `accept` reports: empty."""
        started_s = self._clock()
        try:
            is_restricted = self._matcher.fill_next_token_bitmask(self._mask)
        except Exception as error:
            self._fail(f"matching the grammar failed: {error}", 500)
            return b""
        self._charge(started_s)
        if not is_restricted:
            return b""
        if not self._mask.any():
            self._fail("the grammar allows no token of the vocabulary after this output", 400)
            return b""
        return self._mask.tobytes()

    def accept(self, token_id: int) -> FinishReason | None:
        """See `requests.TokenConstraint`."""
        if self._failure is not None:
            return self._failure
        started_s = self._clock()
        self._num_tokens += 1
        try:
            is_accepted = self._matcher.accept_token(token_id)
        except Exception as error:
            self._fail(f"matching the grammar failed: {error}", 500)
            return self._failure
        self._charge(started_s)
        if not is_accepted:
            self._fail(f"token {token_id} was drawn, which the grammar does not allow", 500)
        if self._failure is None and self._matcher.is_terminated():
            return FinishReason("stop", matched=token_id)
        return self._failure

    def _charge(self, started_s: float) -> None:
        self._spent_s += self._clock() - started_s
        if self._spent_s > ALLOWANCE_S + self._num_tokens * self._ms_per_token / 1e3:
            self._fail(
                f"matching the grammar took {self._spent_s * 1e3:.0f} ms for {self._num_tokens} "
                f"tokens, the limit is {ALLOWANCE_S * 1e3:.0f} ms and {self._ms_per_token:g} ms "
                "each; make it less ambiguous or raise --grammar-match-ms-per-token",
                400,
            )

    def _fail(self, message: str, status_code: int) -> None:
        if status_code == 500:
            logger.error("%s", message)
        self._failure = self._failure or FinishReason("abort", None, message, status_code)


class AfterReasoning:
    """Lets the model think first: `constraint` holds from the token after the end of that.

    Args:
        end_ids: the tokens that end the thinking, one or more
            (upstream: reasoner_grammar_backend.py, without strict thinking).
    """

    def __init__(self, constraint: TokenConstraint, end_ids: Sequence[int]) -> None:
        self._constraint = constraint
        self._end = TokenSequenceMatcher(end_ids)
        self._num_matched = 0

    def allowed_tokens_mask(self) -> bytes:
        return b"" if self._is_thinking else self._constraint.allowed_tokens_mask()

    def accept(self, token_id: int) -> FinishReason | None:
        if not self._is_thinking:
            return self._constraint.accept(token_id)
        self._num_matched = self._end.advance(self._num_matched, token_id)
        return None

    @property
    def _is_thinking(self) -> bool:
        return self._num_matched < len(self._end)
