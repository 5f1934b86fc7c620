"""The results of steps, booked on their requests.

For each chunk of the oldest step: makes a prefill's pages matchable; after its last chunk, and for
a decode, appends the token, with drafts every right one, and applies the stop rules: the request
ends and releases its pages, or is ready for its next decode.
"""

from collections.abc import Callable, Sequence, Set
from itertools import islice

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.requests import FinishReason, LogprobRows, Request, RequestState, TokenEvent
from sgl_pipeline.scheduling.drafts import Drafts
from sgl_pipeline.scheduling.drawn_tokens import take_drawn
from sgl_pipeline.scheduling.logprob_rows import keep_logprobs
from sgl_pipeline.scheduling.offloaded_requests import OffloadedRequests
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.steps_in_flight import StepsInFlight


class StepResults:
    """Books the steps of `in_flight` on their requests; `finish` ends a request."""

    def __init__(
        self,
        in_flight: StepsInFlight,
        running: RunningRequests,
        pages: RequestPages,
        offloaded: OffloadedRequests,
        drafts: Drafts,
        finish: Callable[[Request, FinishReason], None],
    ) -> None:
        self._in_flight, self._running, self._pages = in_flight, running, pages
        self._offloaded, self._drafts, self._finish = offloaded, drafts, finish

    def take(
        self,
        step_id: int,
        token_ids: Sequence[int],
        now_s: float,
        logprobs: Sequence[LogprobRows],
        lost_leases: Set[int],
    ) -> list[TokenEvent]:
        """Applies the result of the oldest step; arguments and errors as `StepScheduler.on_result`
        has them."""
        microbatch = self._in_flight.take_result(step_id, token_ids, logprobs)
        if lost_leases:
            self._offloaded.lose(microbatch.chunks, lost_leases)
        drawn, rows = iter(token_ids), iter(logprobs)
        events = []
        for chunk in microbatch.chunks:
            has_ended = chunk.request.state is RequestState.FINISHED
            event = self._book(chunk, tuple(islice(drawn, chunk.num_samples)), now_s)
            if chunk.request.logprobs is not None:
                runs = list(islice(rows, 1 + len(chunk.draft_ids)))
                if not has_ended and not self._offloaded.is_lost(chunk.request):
                    keep_logprobs(chunk, runs[: len(event.token_ids) or 1] if event else runs[:1])
            if event is not None:
                events.append(event)
        self._offloaded.retract_lost()
        return events

    def _book(self, chunk: Chunk, drawn_ids: tuple[int, ...], now_s: float) -> TokenEvent | None:
        """The commit fence: the pages that `chunk` wrote are now on every stage, and its tokens are
        known."""
        request = chunk.request
        request.steps_in_flight -= 1
        request.num_computed = chunk.end - len(chunk.draft_ids)
        if request.state is RequestState.FINISHED:
            if request.steps_in_flight == 0:
                self._pages.release(request)
            return None
        if self._offloaded.is_lost(request):
            return None
        if not chunk.is_decode:
            self._pages.commit(request)
            if chunk.end < request.prefill_end:
                return None
            self._pages.end_prefill(request)
        if request.first_token_s is None:
            request.first_token_s = now_s
        new_ids, finish = take_drawn(chunk, drawn_ids)
        if chunk.draft_ids:
            self._drafts.took(chunk, len(new_ids))
            request.num_scheduled = request.num_computed = chunk.start + len(new_ids)
        if finish is None:
            self._running.make_ready(request)
        else:
            self._finish(request, finish)
        return TokenEvent(request, new_ids, finish)
