"""Finds stop strings and stop expressions in the text generated so far.

A `StopTextCheck` is part of a request's `StopRules` and runs in the scheduler for every token. The
Detokenizer, not this module, trims the reply. Each call decodes and searches a bounded tail, never
the whole output.
"""

from typing import Any

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.upstream.stop_regex import StopRegexes
from sgl_pipeline.requests import FinishReason

MAX_STOP_STRINGS = 32
# Of all stop strings of a request together: every token is checked against them.
MAX_STOP_CHARACTERS = 1024
# Tokens before the first one of interest that are decoded with it, because a token's text may
# depend on its neighbors (a leading space, a character split over byte tokens). Upstream uses 5.
_CONTEXT_TOKENS = 5
_UNFINISHED = "\ufffd"


def check_stop_strings(asked: Any) -> tuple[str, ...]:
    """The stop strings of a request that asks for `asked`, one or several.

    Raises RequestError (400) when they are not text, empty, too many or too long.
    """
    stops = [asked] if isinstance(asked, str) else asked
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError("stop must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(stops)}")
    if not all(stops):
        raise RequestError("a stop string is empty; name at least one character")
    num_characters = sum(len(stop) for stop in stops)
    if num_characters > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"the stop strings have {num_characters} characters; together they may have "
            f"{MAX_STOP_CHARACTERS}"
        )
    return tuple(stops)


class StopTextCheck:
    """Finds the first of `strings`, or else of `regexes`, that the output text holds, in the order
    asked for (upstream: `Req._check_str_based_finish`). One object per request; called in order.

    Special tokens count as their text, whether or not the reply shows them.

    Args:
        tokenizer: as loaded by `model_files.load_tokenizer`.
        strings: non-empty stop strings.
    """

    def __init__(self, tokenizer: Any, strings: tuple[str, ...], regexes: StopRegexes) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        self._regexes = regexes
        # Characters that must stay, so that a match that began in them is found.
        longest = max((len(string) for string in strings), default=1) - 1
        self._tail_length = max(longest, regexes.window_characters if regexes else 0)
        # Text of the output so far that a match may still begin in.
        self._tail = ""
        # Whether text before the tail was cut off: its beginning is then not the output's.
        self._is_cut = False
        self._num_decoded = 0  # output tokens whose text has gone into the tail for good
        self._last_text = ""

    def __call__(self, output_ids: list[int]) -> FinishReason | None:
        """The reason to stop after the last of `output_ids`, or None."""
        text = self._last_text = self._tail + self._new_text(output_ids)
        matched = next((string for string in self._strings if string in text), None)
        if matched is None and self._regexes:
            # The character before the cut is context, for `^` and `\b`.
            matched = self._regexes.first_match(text, start=int(self._is_cut))
        if matched is not None:
            return FinishReason("stop", matched=matched)
        if self._num_decoded == len(output_ids):
            self._is_cut |= len(text) > self._tail_length
            self._tail = text[max(0, len(text) - self._tail_length) :]
        return None

    @property
    def ends_in_partial_match(self) -> bool:
        """True if the text ends with the beginning of a stop string: then a stream must wait.

        What an expression matches is not trimmed from the reply, so nothing waits for one.
        """
        return any(
            self._last_text.endswith(string[:length])
            for string in self._strings
            for length in range(1, len(string))
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
