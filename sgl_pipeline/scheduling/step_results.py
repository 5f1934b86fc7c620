"""The results of steps, booked on their requests.

For each chunk of the oldest step: makes a prefill's pages matchable; after its last chunk, and for
a decode, appends the token and applies the stop rules: the request ends and releases its pages, or
is ready for its next decode.
"""

from collections.abc import Callable, Sequence

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.requests import FinishReason, LogprobRows, Request, RequestState, TokenEvent
from sgl_pipeline.scheduling.logprob_rows import keep_logprobs
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.steps_in_flight import StepsInFlight
from sgl_pipeline.scheduling.stop_rules import finish_reason


class StepResults:
    """Books the steps of `in_flight` on their requests; `finish` ends a request."""

    def __init__(
        self,
        in_flight: StepsInFlight,
        running: RunningRequests,
        pages: RequestPages,
        finish: Callable[[Request, FinishReason], None],
    ) -> None:
        self._in_flight, self._running, self._pages = in_flight, running, pages
        self._finish = finish

    def take(
        self,
        step_id: int,
        token_ids: Sequence[int],
        now_s: float,
        logprobs: Sequence[LogprobRows],
    ) -> list[TokenEvent]:
        """Applies the result of the oldest step; arguments and errors as `StepScheduler.on_result`
        has them."""
        microbatch = self._in_flight.take_result(step_id, token_ids, logprobs)
        drawn, rows = iter(token_ids), iter(logprobs)
        events = []
        for chunk in microbatch.chunks:
            new_ids = (next(drawn),) if chunk.samples else ()
            if chunk.request.logprobs is not None:
                keep_logprobs(chunk, next(rows))
            event = self._book(chunk, new_ids, now_s)
            if event is not None:
                events.append(event)
        return events

    def _book(self, chunk: Chunk, new_ids: tuple[int, ...], now_s: float) -> TokenEvent | None:
        """The commit fence: the pages that `chunk` wrote are now on every stage, and its token is
        known."""
        request = chunk.request
        request.steps_in_flight -= 1
        request.num_computed = chunk.end
        if request.state is RequestState.FINISHED:
            if request.steps_in_flight == 0:
                self._pages.release(request)
            return None
        if not chunk.is_decode:
            self._pages.commit(request)
            if chunk.end < request.prefill_end:
                return None
            self._pages.end_prefill(request)
        if request.first_token_s is None:
            request.first_token_s = now_s
        if request.stops.max_new_tokens == 0:
            new_ids = ()
        request.output_ids += new_ids
        finish = finish_reason(request)
        if finish is None:
            self._running.make_ready(request)
        else:
            self._finish(request, finish)
        return TokenEvent(request, new_ids, finish)
