"""Adds draft tokens to the decodes of a step, where its time and its pages allow.

A draft delays and displaces no other request: a step with prompts has none, and pages for drafts
are free ones that no running request is about to need.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Protocol

from sgl_pipeline.microbatch import Chunk, work_of
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.grammar_drafts import Draft, DraftKind, grammar_draft, guessed
from sgl_pipeline.scheduling.ngram_drafts import NgramIndex, NgramRange
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.throttle import PipelineLoad, TokenBudget
from sgl_pipeline.throttle.draft_budget import (
    MOST_ROWS,
    Acceptance,
    draft_budget,
    least_chance,
    may_draft,
)

# N-grams of SmolLM2's answers: 4 tokens draft nearly as well as 6, and one is better than none
# (benchmark/speculation). An index has at most twice the capacity, at 400 bytes a token.
LENGTHS = NgramRange(1, 4)
CAPACITY = 8192
# The chances of a request's first draft tokens. A forced text can be written in other tokens than
# expected, which is rare once an answer has had it.
FIRST_CHANCES = {DraftKind.GUESS: 0.5, DraftKind.FORCED: 0.9, DraftKind.ENDING: 0.5}
_NO_DRAFT = Draft()


def _new_acceptance() -> dict[DraftKind, Acceptance]:
    return {kind: Acceptance(prior_chance=chance) for kind, chance in FIRST_CHANCES.items()}


class DraftSource(Protocol):
    """The drafts of one request."""

    def draft(self, num_tokens: int) -> tuple[int, ...]:
        """A guess at its next tokens, at most `num_tokens`."""

    def next_token(self, after: Sequence[int]) -> int | None:
        """A guess at the token behind its own and then `after`."""


@dataclass(slots=True)
class _Drafter:
    """The drafts of one request, how often its draft tokens of each kind were right, and the draft
    of its newest step."""

    source: DraftSource
    acceptance: dict[DraftKind, Acceptance] = field(default_factory=_new_acceptance)
    draft: Draft = _NO_DRAFT

    def best_chance(self, request: Request) -> float:
        """The chance of the likeliest kind that a draft of `request` may have."""
        kinds = (DraftKind.GUESS,) if request.constraint is None else tuple(DraftKind)
        return max(self.acceptance[kind].chance for kind in kinds)

    def chances(self, draft: Draft) -> list[float]:
        """The chances that the tokens of `draft` are right, each if those before it are."""
        return [self.acceptance[kind].chance for kind in draft.kinds]

    def note_step(self, draft: Draft) -> None:
        """The request's next step has `draft`. A kind that it has none of is slowly forgotten."""
        self.draft = draft
        for kind, acceptance in self.acceptance.items():
            if kind not in draft.kinds:
                self.acceptance[kind] = acceptance.after(0, 0)

    def learn(self, num_drafted: int, num_right: int) -> None:
        """The newest step had the first `num_drafted` tokens of its draft, `num_right` were
        right."""
        right = self.draft.kinds[:num_right]
        checked = self.draft.kinds[: min(num_drafted, num_right + 1)]
        for kind in set(self.draft.kinds):
            acceptance = self.acceptance[kind]
            self.acceptance[kind] = acceptance.after(checked.count(kind), right.count(kind))


class Drafts:
    """Drafts of at most `most_each` tokens (0: there are none), from `source_of` their request.

    Since the start: `num_steps` times a request had a draft in a step, in all `num_drafted` tokens,
    of which `num_accepted` were right.
    """

    def __init__(self, most_each: int, pages: RequestPages, running: RunningRequests) -> None:
        self.num_steps = self.num_drafted = self.num_accepted = 0
        self.source_of: Callable[[Request], DraftSource] = _ngrams
        self._most_each = most_each
        self._pages = pages
        self._running = running
        self._drafters: dict[Request, _Drafter] = {}

    def extend(self, chunks: list[Chunk], load: PipelineLoad, budget: TokenBudget) -> list[Chunk]:
        """The step of `chunks` with drafts. Those that have one come behind the others, because the
        kernels of decodes take the leading chunks of one row."""
        if not self._most_each or not chunks or not may_draft(load, budget):
            return chunks
        if not all(chunk.is_decode for chunk in chunks):
            return chunks
        work = work_of(chunks)
        is_alone = load.running_decodes == 1
        least = least_chance(load.step_times, work, is_alone=is_alone)
        if least > 1.0:
            return chunks
        # To draft under a grammar takes time: about twice as many tokens as the step can have.
        grammar_most = -(-2 * MOST_ROWS // len(chunks))
        drafts = [self._draft(chunk.request, least, grammar_most) for chunk in chunks]
        chances = [
            self._drafters[chunk.request].chances(draft) if draft.token_ids else []
            for chunk, draft in zip(chunks, drafts, strict=True)
        ]
        counts = draft_budget(load.step_times, work, chances, is_alone=is_alone)
        extended = [
            self._drafted(chunk, draft.first(count))
            for chunk, draft, count in zip(chunks, drafts, counts, strict=True)
        ]
        return sorted(extended, key=lambda chunk: chunk.length > 1)

    def took(self, chunk: Chunk, num_taken: int) -> None:
        """The step with `chunk`, which has a draft, gave its request `num_taken` tokens: one, and
        one for each right draft token up to the request's end."""
        num_drafted, num_right = len(chunk.draft_ids), max(0, num_taken - 1)
        self.num_steps += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_right
        drafter = self._drafters.get(chunk.request)
        if drafter is not None:
            drafter.learn(num_drafted, num_right)

    @property
    def most_each(self) -> int:
        """Most draft tokens of a request in a step."""
        return self._most_each

    def chance(self, request: Request) -> float:
        """The expected chance that a draft token of `request` is right."""
        drafter = self._drafters.get(request) or _Drafter(self.source_of(request))
        return drafter.best_chance(request)

    def expected_tokens(self, chunk: Chunk) -> float:
        """The mean number of tokens that a step in flight with `chunk`, which samples, gives its
        request: one, and a draft token if those before it are right too."""
        if not chunk.draft_ids:
            return 1.0
        drafter = self._drafters[chunk.request]
        chances = drafter.chances(drafter.draft)[: len(chunk.draft_ids)]
        right: float = sum(accumulate(chances, mul))
        return 1.0 + right

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._drafters.pop(request, None)

    def _draft(self, request: Request, least_chance: float, grammar_most: int) -> Draft:
        """The draft of a request, if its drafts are right often enough; with a grammar one of at
        most `grammar_most` tokens. A lease has no place for rows that may be wrong, so such
        requests have none."""
        # The step draws a token behind the draft.
        most = min(self._most_each, request.stops.max_new_tokens - len(request.output_ids) - 1)
        if most <= 0 or request.lease is not None:
            return _NO_DRAFT
        drafter = self._drafters.get(request)
        if drafter is None:
            drafter = self._drafters[request] = _Drafter(self.source_of(request))
        if drafter.best_chance(request) < least_chance:
            return _NO_DRAFT
        if request.constraint is not None:
            most = min(most, grammar_most)
            draft = grammar_draft(request.constraint, most, drafter.source.next_token)
        else:
            draft = guessed(drafter.source.draft(most))
        if not draft.token_ids:
            request.drafts.note_none()
        return draft

    def _drafted(self, chunk: Chunk, draft: Draft) -> Chunk:
        """The chunk of the next step, which its request's drafter learns from."""
        drafter = self._drafters.get(chunk.request)
        if drafter is None:
            return chunk
        drafter.note_step(draft)
        return self._with_draft(chunk, draft.token_ids)

    def _with_draft(self, chunk: Chunk, draft: tuple[int, ...]) -> Chunk:
        """The chunk with as much of the draft as there are pages for."""
        request, num_pages = chunk.request, len(chunk.request.pages)
        num_spare = max(0, self._pages.num_free - len(self._running))
        while draft and self._pages.pages_for(chunk.end + len(draft)) > num_pages + num_spare:
            draft = draft[:-1]
        if not draft:
            return chunk
        extended = self._pages.extend(request, chunk.end + len(draft))
        assert extended
        return Chunk(request, chunk.start, chunk.length + len(draft), True, True, draft)


def _ngrams(request: Request) -> DraftSource:
    return NgramIndex(request, LENGTHS, CAPACITY)
