"""Stop strings: noticing that the text generated so far holds one.

A `StopStringCheck` rides on the `StopRules` of a request and is called by the scheduler for every
token. The Detokenizer, not this file, trims the reply. Each call decodes a bounded tail, never the
whole output.
"""

from typing import Any

from sgl_pipeline.requests import FinishReason

# Tokens before the first one of interest that are decoded with it, because a token's text may
# depend on its neighbours (a leading space, a character split over byte tokens). Upstream uses 5.
_CONTEXT_TOKENS = 5
_UNFINISHED = "\ufffd"


class StopStringCheck:
    """Finds the first of `stops` in the output text. One object per request; called in order.

    Args:
        tokenizer: as loaded by `model_files.load_tokenizer`.
        stops: non-empty strings.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._longest = max(len(stop) for stop in stops)
        # Text of the output so far that a match may still begin in.
        self._tail = ""
        self._num_decoded = 0  # output tokens whose text has gone into the tail for good
        self._last_text = ""

    def __call__(self, output_ids: list[int]) -> FinishReason | None:
        """The reason to stop after the last of `output_ids`, or None."""
        text = self._last_text = self._tail + self._new_text(output_ids)
        found = [(text.find(stop), -len(stop), stop) for stop in self._stops]
        matches = [match for match in found if match[0] >= 0]
        if matches:
            return FinishReason("stop", matched=min(matches)[2])
        if self._num_decoded == len(output_ids):
            self._tail = text[max(0, len(text) - self._longest + 1) :]
        return None

    @property
    def ends_in_partial_match(self) -> bool:
        """Whether the text ends with the beginning of a stop string: then a stream must wait."""
        return any(
            self._last_text.endswith(stop[:length])
            for stop in self._stops
            for length in range(1, len(stop))
        )

    def _new_text(self, output_ids: list[int]) -> str:
        """The text since the tail. It stays uncommitted while it ends in half a character."""
        start = max(0, self._num_decoded - _CONTEXT_TOKENS)
        before = self._decode(output_ids[start : self._num_decoded])
        new_text = self._decode(output_ids[start:])[len(before) :]
        # A character has at most four bytes: what is unfinished for longer is not text at all.
        if not new_text.endswith(_UNFINISHED) or len(output_ids) - self._num_decoded >= 4:
            self._num_decoded = len(output_ids)
            return new_text
        return new_text.rstrip(_UNFINISHED)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids) if ids else ""
