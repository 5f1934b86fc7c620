"""Schedules find what is broken of drafts on purpose. That they have some, right and wrong, is in
`test_disaggregated_schedules.py`."""

from collections.abc import Callable

import pytest
from fault_schedules.disaggregated_world import run_disaggregated_seed
from fault_schedules.world import run_seed
from support.mutations import Mutation, require_found

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.requests import Request, TokenEvent
from sgl_pipeline.scheduling.drafts import Drafts
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.step_results import StepResults
from sgl_pipeline.scheduling.steps_in_flight import StepsInFlight

# Every mutation below is found much sooner.
MOST_SEEDS = 250


def rows_of_wrong_drafts_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    book = StepResults._book

    def mutated(
        self: StepResults, chunk: Chunk, drawn_ids: tuple[int, ...], now_s: float
    ) -> TokenEvent | None:
        event = book(self, chunk, drawn_ids, now_s)
        if event is not None and len(event.token_ids) < chunk.num_samples and not event.finish:
            chunk.request.num_scheduled = chunk.request.num_computed = chunk.request.num_tokens
        return event

    patch.setattr(StepResults, "_book", mutated)


def rows_of_wrong_drafts_reach_the_cache(patch: pytest.MonkeyPatch) -> None:
    """The row of the last token, where the step has computed that of a wrong draft in its place."""
    took, release = Drafts.took, RequestPages.release
    ends_wrong: set[Request] = set()

    def noted(self: Drafts, chunk: Chunk, num_taken: int) -> None:
        took(self, chunk, num_taken)
        known = ends_wrong.add if num_taken < chunk.num_samples else ends_wrong.discard
        known(chunk.request)

    def mutated(self: RequestPages, request: Request) -> object:
        if request in ends_wrong:
            request.num_computed = request.num_tokens
        return release(self, request)

    patch.setattr(Drafts, "took", noted)
    patch.setattr(RequestPages, "release", mutated)


def pages_of_drafts_are_not_the_requests_own(patch: pytest.MonkeyPatch) -> None:
    with_draft = Drafts._with_draft

    def mutated(self: Drafts, chunk: Chunk, draft: tuple[int, ...]) -> Chunk:
        request = chunk.request
        num_pages = len(request.pages)
        drafted = with_draft(self, chunk, draft)
        self._pages._pool.free(request.pages[num_pages:])
        return drafted

    patch.setattr(Drafts, "_with_draft", mutated)


def drafts_take_the_pages_that_others_need(patch: pytest.MonkeyPatch) -> None:
    with_draft = Drafts._with_draft

    def mutated(self: Drafts, chunk: Chunk, draft: tuple[int, ...]) -> Chunk:
        with pytest.MonkeyPatch.context() as lent:
            available = self._pages.num_available + len(self._running)
            lent.setattr(RequestPages, "num_free", property(lambda pages: available))
            return with_draft(self, chunk, draft)

    patch.setattr(Drafts, "_with_draft", mutated)


def prompts_wait_for_drafts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("sgl_pipeline.scheduling.drafts.may_draft", lambda load, budget: True)


def a_step_that_was_taken_back_keeps_its_drafts(patch: pytest.MonkeyPatch) -> None:
    forget = StepsInFlight.forget

    def mutated(self: StepsInFlight) -> None:
        for microbatch in self:
            for chunk in microbatch.chunks:
                chunk.request.num_scheduled += len(chunk.draft_ids)
        forget(self)

    patch.setattr(StepsInFlight, "forget", mutated)


def drafts_are_drawn_tokens(patch: pytest.MonkeyPatch) -> None:
    book = StepResults._book

    def mutated(
        self: StepResults, chunk: Chunk, drawn_ids: tuple[int, ...], now_s: float
    ) -> TokenEvent | None:
        drawn = (*chunk.draft_ids, drawn_ids[-1]) if chunk.draft_ids else drawn_ids
        return book(self, chunk, drawn, now_s)

    patch.setattr(StepResults, "_book", mutated)


MUTATIONS: tuple[Mutation, ...] = (
    rows_of_wrong_drafts_count_as_computed,
    rows_of_wrong_drafts_reach_the_cache,
    pages_of_drafts_are_not_the_requests_own,
    drafts_take_the_pages_that_others_need,
    prompts_wait_for_drafts,
    a_step_that_was_taken_back_keeps_its_drafts,
    drafts_are_drawn_tokens,
)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_seed, run_disaggregated_seed], ids=["one server", "apart"])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_what_is_broken_on_purpose_is_found(
    mutation: Mutation, run: Callable[[int], object], request: pytest.FixtureRequest
) -> None:
    require_found(mutation, request, run, range(MOST_SEEDS))
