"""A grammar that holds once the model has thought."""

from collections.abc import Sequence

from sglang.srt.utils.token_sequence_matcher import TokenSequenceMatcher

from sgl_pipeline.requests import FinishReason, TokenConstraint


class AfterReasoning:
    """Lets the model think first: `constraint` holds from the token after the end of that.

    Args:
        end_ids: the tokens that end the thinking, one or more
            (upstream: reasoner_grammar_backend.py, without strict thinking).
    """

    def __init__(self, constraint: TokenConstraint, end_ids: Sequence[int]) -> None:
        self._constraint = constraint
        self._end = TokenSequenceMatcher(end_ids)
        # Tokens of the end, by the output alone and with the tokens that are tried.
        self._num_matched = self._num_matched_tried = 0

    def allowed_tokens_masks(self, draft_ids: Sequence[int] = ()) -> list[bytes]:
        num_matched = self._num_matched
        for place, token_id in enumerate(draft_ids):
            if num_matched == len(self._end):
                return [b""] * place + self._constraint.allowed_tokens_masks(draft_ids[place:])
            num_matched = self._end.advance(num_matched, token_id)
        free = [b""] * len(draft_ids)
        is_thinking = num_matched < len(self._end)
        return [*free, *([b""] if is_thinking else self._constraint.allowed_tokens_masks())]

    def accept(self, token_id: int) -> FinishReason | None:
        if self._num_matched == len(self._end):
            return self._constraint.accept(token_id)
        self._num_matched = self._end.advance(self._num_matched, token_id)
        self._num_matched_tried = self._num_matched
        return None

    def forced_tokens(self) -> tuple[int, ...]:
        return () if self._is_tried_thinking else self._constraint.forced_tokens()

    def try_token(self, token_id: int) -> bool:
        if not self._is_tried_thinking:
            return self._constraint.try_token(token_id)
        self._num_matched_tried = self._end.advance(self._num_matched_tried, token_id)
        return True

    def take_back(self) -> None:
        self._constraint.take_back()
        self._num_matched_tried = self._num_matched

    @property
    def _is_tried_thinking(self) -> bool:
        return self._num_matched_tried < len(self._end)
