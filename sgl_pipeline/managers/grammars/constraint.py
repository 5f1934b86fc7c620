"""`TokenConstraint`s by compiled grammars, which restrict the tokens of one request.

They run in the scheduler's loop: drafts try tokens, the step's encoder asks for masks, the stop
rules pass on drawn tokens. No compile happens here, and the cost of matching is counted: a grammar
that is too slow ends its request, and nothing raises.
"""

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import xgrammar

from sgl_pipeline.managers.grammars.forced_path import ForcedPath
from sgl_pipeline.managers.grammars.vocabulary import GrammarVocabulary
from sgl_pipeline.requests import FinishReason

logger = logging.getLogger(__name__)

# CPU time of matching beyond the limit per token, for a few expensive tokens among cheap ones.
ALLOWANCE_S = 0.25
# The same for drafts, and their limit for each output token: a step takes milliseconds, and a draft
# usually 0.3. A grammar that costs more has fewer drafts.
DRAFT_ALLOWANCE_S = 0.02
DRAFT_MS_PER_TOKEN = 1.0
# Pieces of a token in which a forced text, which may have no end, is looked for.
MOST_PIECES = 16


class GrammarConstraint:
    """Follows the grammar from the first token that it is given.

    When the text is complete only stop tokens are allowed; the grammar's are the model's EOS ids,
    as in SGLang, and one of them ends the request even with `ignore_eos`.

    Args:
        ms_per_token: CPU time that matching may take on average, after ALLOWANCE_S. One call cannot
            be interrupted, but costs of ambiguous grammars grow from token to token.
        clock: CPU seconds of this thread, which a busy machine does not make longer.
    """

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        vocabulary: GrammarVocabulary,
        ms_per_token: float,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._vocabulary = vocabulary
        self._path = ForcedPath(vocabulary.text_tokens)
        self._mask = np.zeros((1, -(-vocabulary.size // 32)), np.int32)
        self._ms_per_token = ms_per_token
        self._clock = clock
        self._spent_s = self._draft_s = 0.0
        self._num_tokens = self._num_tried = 0
        self._failure: FinishReason | None = None

    def allowed_tokens_masks(self, draft_ids: Sequence[int] = ()) -> list[bytes]:
        """See `requests.TokenConstraint`. After a failure, which `accept` reports: empty ones."""
        masks = [self._next_mask()]
        if draft_ids:
            masks += self._masks_behind(draft_ids)
        return masks

    def accept(self, token_id: int) -> FinishReason | None:
        """See `requests.TokenConstraint`."""
        if self._failure is not None:
            return self._failure
        started_s = self._clock()
        self._num_tokens += 1
        try:
            is_accepted = self._matcher.accept_token(token_id)
        except Exception as error:
            return self._fail(f"matching the grammar failed: {error}", 500)
        if is_accepted:
            self._path.takes(token_id)
        self._charge(started_s)
        if not is_accepted:
            # It may have been drawn behind a draft, where an empty mask is no failure yet.
            self._next_mask()
            self._fail(f"token {token_id} was drawn, which the grammar does not allow", 500)
        if self._failure is None and self._matcher.is_terminated():
            return FinishReason("stop", matched=token_id)
        return self._failure

    def forced_tokens(self) -> tuple[int, ...]:
        """See `requests.TokenConstraint`."""
        if self._is_drafting_over():
            return ()
        started_s = self._clock()
        text = self._forced_text()
        self._path.forces(text, self._num_tried)
        forced = self._vocabulary.text_tokens.of(text) if text else ()
        self._draft_s += self._clock() - started_s
        return forced

    def try_token(self, token_id: int) -> bool:
        """See `requests.TokenConstraint`."""
        is_text = token_id not in self._vocabulary.text_tokens.textless_ids
        if not is_text or self._is_drafting_over():
            return False
        started_s = self._clock()
        num_tried = self._num_tried
        is_accepted = self._tries(token_id)
        if is_accepted:
            self._path.tries(token_id, num_tried)
        self._draft_s += self._clock() - started_s
        return is_accepted

    def take_back(self) -> None:
        """See `requests.TokenConstraint`."""
        self._matcher.rollback(self._num_tried)
        self._num_tried = 0

    def _next_mask(self) -> bytes:
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

    def _masks_behind(self, draft_ids: Sequence[int]) -> list[bytes]:
        """A mask for after each draft token. An empty one where the grammar allows no token: the
        request fails only if it gets there."""
        started_s = self._clock()
        masks = []
        try:
            for token_id in draft_ids:
                if not self._tries(token_id):
                    self._fail(f"the grammar no longer allows draft token {token_id}", 500)
                    break
                is_restricted = self._matcher.fill_next_token_bitmask(self._mask)
                masks.append(self._mask.tobytes() if is_restricted and self._mask.any() else b"")
        except Exception as error:
            self._fail(f"matching the grammar failed: {error}", 500)
        self.take_back()
        self._draft_s += self._clock() - started_s
        return masks + [b""] * (len(draft_ids) - len(masks))

    def _forced_text(self) -> bytes:
        """The next bytes that the grammar leaves no choice about, as far as its masks show: masks,
        because xgrammar's own search (find_jump_forward_string) has no bound."""
        text, num_pieces = b"", 0
        try:
            while num_pieces < MOST_PIECES:
                if not self._matcher.fill_next_token_bitmask(self._mask):
                    break
                piece, goes_on = self._vocabulary.text_tokens.forced_by(self._mask[0])
                if not piece or not self._matcher.accept_string(piece):
                    break
                text, num_pieces = text + piece, num_pieces + 1
                if not goes_on:
                    break
        except Exception as error:
            self._fail(f"matching the grammar failed: {error}", 500)
        self._matcher.rollback(num_pieces)
        return text

    def _tries(self, token_id: int) -> bool:
        try:
            is_accepted = self._matcher.accept_token(token_id)
        except Exception as error:
            self._fail(f"matching the grammar failed: {error}", 500)
            return False
        self._num_tried += is_accepted
        return is_accepted

    def _is_drafting_over(self) -> bool:
        """True if drafts have taken too long, until there are more output tokens."""
        limit_s = DRAFT_ALLOWANCE_S + self._num_tokens * DRAFT_MS_PER_TOKEN / 1e3
        return self._failure is not None or self._draft_s > limit_s

    def _charge(self, started_s: float) -> None:
        self._spent_s += self._clock() - started_s
        if self._spent_s > ALLOWANCE_S + self._num_tokens * self._ms_per_token / 1e3:
            self._fail(
                f"matching the grammar took {self._spent_s * 1e3:.0f} ms for {self._num_tokens} "
                f"tokens, the limit is {ALLOWANCE_S * 1e3:.0f} ms and {self._ms_per_token:g} ms "
                "each; make it less ambiguous or raise --grammar-match-ms-per-token",
                400,
            )

    def _fail(self, message: str, status_code: int) -> FinishReason:
        """The first failure, which is this one if there was none."""
        if status_code == 500:
            logger.error("%s", message)
        self._failure = self._failure or FinishReason("abort", None, message, status_code)
        return self._failure
