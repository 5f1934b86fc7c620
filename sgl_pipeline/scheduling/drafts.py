"""Adds draft tokens to the decodes of a step, where its time and its pages allow.

A draft delays and displaces no other request: a step with prompts has none, and pages for drafts
are free ones that no running request is about to need.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sgl_pipeline.microbatch import Chunk, work_of
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.ngram_drafts import NgramIndex, NgramRange
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.throttle import PipelineLoad, TokenBudget
from sgl_pipeline.throttle.draft_budget import Acceptance, draft_budget, least_chance, may_draft

# N-grams of SmolLM2's answers: 4 tokens draft nearly as well as 6, and one is better than none
# (benchmark/speculation). An index has at most twice the capacity, at 400 bytes a token.
LENGTHS = NgramRange(1, 4)
CAPACITY = 8192


class DraftSource(Protocol):
    """The drafts of one request."""

    def draft(self, num_tokens: int) -> tuple[int, ...]:
        """A guess at its next tokens, at most so many."""


@dataclass(slots=True)
class _Drafter:
    """The drafts of one request, and how often they were right."""

    source: DraftSource
    acceptance: Acceptance = field(default_factory=Acceptance)


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
        drafts = [self._draft(chunk.request, least) for chunk in chunks]
        chances = [
            self._drafters[chunk.request].acceptance.chance if draft else 0.0
            for chunk, draft in zip(chunks, drafts, strict=True)
        ]
        counts = draft_budget(load.step_times, work, chances, self._most_each, is_alone=is_alone)
        extended = [
            self._with_draft(chunk, draft[:count])
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
            drafter.acceptance = drafter.acceptance.after(num_drafted, num_right)

    @property
    def most_each(self) -> int:
        """Most draft tokens of a request in a step."""
        return self._most_each

    def chance(self, request: Request) -> float:
        """The expected chance that a draft token of `request` is right."""
        drafter = self._drafters.get(request)
        return (Acceptance() if drafter is None else drafter.acceptance).chance

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._drafters.pop(request, None)

    def _draft(self, request: Request, least_chance: float) -> tuple[int, ...]:
        """The draft of a request, if its drafts are right often enough.

        A grammar has a mask for the next token only, and a lease no place for rows that may be
        wrong, so such requests have none.
        """
        # The step draws a token behind the draft.
        most = min(self._most_each, request.stops.max_new_tokens - len(request.output_ids) - 1)
        if most <= 0 or request.constraint is not None or request.lease is not None:
            return ()
        drafter = self._drafters.get(request)
        if drafter is None:
            drafter = self._drafters[request] = _Drafter(self.source_of(request))
        draft: tuple[int, ...] = ()
        if drafter.acceptance.chance >= least_chance:
            draft = drafter.source.draft(most)
        if not draft:
            drafter.acceptance = drafter.acceptance.after(0, 0)
        return draft

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
