"""Holds the drafts of one scheduler to their promise, which is to displace nobody; and drafts of
which most tokens are right."""

from collections.abc import Sequence
from random import Random

from fault_schedules.fake_model import VOCABULARY, Oracle

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.pipeline_load import PipelineLoad, TokenBudget
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling import StepScheduler

WRONG_SHARE = 0.3


class MostlyRight:
    """A `DraftSource` that knows what the request will draw, and errs now and then."""

    def __init__(self, request: Request, num_layers: int) -> None:
        self._request = request
        self._right = Oracle(request, num_layers).output

    def draft(self, num_tokens: int) -> tuple[int, ...]:
        start = len(self._request.output_ids)
        random = Random(f"{self._request.request_id} {start}")
        return tuple(
            (token + (random.random() < WRONG_SHARE)) % VOCABULARY
            for token in self._right[start : start + num_tokens]
        )

    def next_token(self, after: Sequence[int]) -> int | None:
        position = len(self._request.output_ids) + len(after)
        return self._right[position] if position < len(self._right) else None


class DraftRules:
    """Looks at each decision of `scheduler` about drafts, before and after."""

    def __init__(self, scheduler: StepScheduler) -> None:
        self._scheduler = scheduler
        self._extend = scheduler.drafts.extend
        scheduler.drafts.extend = self._watched  # type: ignore[method-assign]

    def _watched(self, chunks: list[Chunk], load: PipelineLoad, budget: TokenBudget) -> list[Chunk]:
        scheduler, before = self._scheduler, self._displaced()
        num_pages = {chunk.request: len(chunk.request.pages) for chunk in chunks}
        extended = self._extend(chunks, load, budget)
        assert self._displaced() == before, "a draft has displaced a request or a cached page"
        undrafted = {one.request: (one.start, one.end - len(one.draft_ids)) for one in extended}
        assert undrafted == {one.request: (one.start, one.end) for one in chunks}
        drafted = [chunk.request for chunk in extended if chunk.draft_ids]
        assert all(request.lease is None for request in drafted)
        assert not drafted or not load.waiting_tokens, "a prompt waits for the time of drafts"
        if any(len(request.pages) > num_pages[request] for request in drafted):
            assert scheduler.num_free_pages >= scheduler.num_running, "too few pages are left"
        return extended

    def _displaced(self) -> tuple[int, int]:
        """Requests that were retracted, and pages of the cache that others may take."""
        scheduler = self._scheduler
        return scheduler.num_retractions, scheduler._pages.num_available - scheduler.num_free_pages
