"""Counts a request's reasoning tokens, for the usage numbers of its answer.

The rules are upstream's (`managers/schedule_batch.py`, `Req.update_reasoning_tokens` and its
neighbor; the marks: `managers/scheduler.py`): the user's view of the reasoning is cut out
elsewhere, by text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.sampling.sampling_params import get_request_reasoning_end_token_ids
from sglang.srt.utils.token_sequence_matcher import TokenSequenceMatcher

from sgl_pipeline.managers.upstream.upstream_messages import GenerateMessage


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The token ids around reasoning in a model's output.

    `end` closes it. A model that was not asked to reason opens it with `self_opened` (empty: it
    never does). A request may name one of `selectable_ends` instead of `end`.
    """

    end: tuple[int, ...] = ()
    self_opened: tuple[int, ...] = ()
    selectable_ends: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_parser(cls, name: str | None, tokenizer: Any) -> "ReasoningMarks":
        """The marks of `--reasoning-parser name`; without a parser nothing counts as reasoning."""
        if name is None:
            return cls()
        detector = ReasoningParser(name, stream_reasoning=False, tokenizer=tokenizer).detector
        selectable = getattr(detector, "request_selectable_think_end_tokens", ())
        return cls(
            end=tuple(detector.get_think_end_token_ids(tokenizer)),
            self_opened=tuple(detector.get_self_opened_think_start_token_ids(tokenizer) or ()),
            selectable_ends=tuple(
                tuple(tokenizer.encode(text, add_special_tokens=False)) for text in selectable
            ),
        )

    def counter(self, message: GenerateMessage) -> "ReasoningCounter":
        """A counter for the request of `message`, a TokenizedGenerateReqInput."""
        if not message.require_reasoning:
            return ReasoningCounter(self.self_opened, self.end if self.self_opened else ())
        chosen = get_request_reasoning_end_token_ids(
            message.sampling_params.custom_params, allowed_sequences=self.selectable_ends
        )
        return ReasoningCounter((), chosen or self.end)


class ReasoningCounter:
    """Counts one request's reasoning tokens, its marks included.

    Args:
        start: tokens that the output must begin with, or none of it is reasoning.
        end: tokens that close it; empty: nothing is counted.
    """

    def __init__(self, start: Sequence[int], end: Sequence[int]) -> None:
        self.count = 0
        self._start = tuple(start)
        self._num_started = 0
        self._end = TokenSequenceMatcher(end) if end else None
        self._num_ended = 0

    def add(self, new_ids: Sequence[int]) -> None:
        """Takes the next output tokens, in order."""
        for token in new_ids:
            if self._end is None:
                return
            if self._num_started < len(self._start):
                self._open(token)
                continue
            self.count += 1
            self._num_ended = self._end.advance(self._num_ended, token)
            if self._num_ended == len(self._end):
                self._end = None

    def _open(self, token: int) -> None:
        if token != self._start[self._num_started]:
            self._end = None
            return
        self._num_started += 1
        if self._num_started == len(self._start):
            self.count = len(self._start)
