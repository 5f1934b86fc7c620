"""The state of the whole system as the policies see it, made of the sums that its parts keep.

It looks at individual requests only while they are being prefilled, and changes nothing.
"""

from typing import NamedTuple

from sgl_pipeline.args import Accounting
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.decode_reserve import DecodeReserve
from sgl_pipeline.scheduling.kv_tier import KvTier
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.steps_in_flight import StepsInFlight
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue
from sgl_pipeline.step_work import StepTimes, attended_tokens
from sgl_pipeline.throttle import PipelineLoad


class _Unscheduled(NamedTuple):
    """Prompt tokens of running requests that are not scheduled yet: all, the tokens that they
    attend to, and those of the request that is first in order."""

    tokens: int
    attended_tokens: int
    first_prompt_tokens: int


class LoadMeter:
    """Reads the parts that it is given."""

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningRequests,
        pages: RequestPages,
        in_flight: StepsInFlight,
        decode_reserve: DecodeReserve,
        tier: KvTier,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._pages = pages
        self._in_flight = in_flight
        self._decode_reserve = decode_reserve
        self._tier = tier

    def read(
        self, accounting: Accounting, step_times: StepTimes | None, now_s: float
    ) -> PipelineLoad:
        """The load now, its tokens and pages counted by `accounting`; `now_s` is the clock of
        `Request.arrival_s`, in seconds."""
        running, pages = self._running, self._pages
        prefilling = self._prefilling()
        return PipelineLoad(
            step_id=self._in_flight.next_id,
            pipeline_depth=self._in_flight.limit,
            waiting_tokens=self._waiting.tokens_to_compute(accounting) + prefilling.tokens,
            loading_tokens=self._tier.loads.loading_tokens,
            prompts=len(self._waiting) + len(running.prefilling),
            running_decodes=len(running.decoding),
            ready_decodes=len(running.ready),
            free_pages=pages.num_available if accounting.evictable else pages.num_free,
            # Requests whose prompt is on its way, or has come, begin to grow at once.
            reserved_pages=self._decode_reserve.pages(
                running.remaining_output_tokens + self._tier.arrivals.promised_output_tokens
            ),
            total_pages=pages.num_pages,
            steps_in_flight=len(self._in_flight),
            waiting_attended_tokens=self._waiting.attended_to_compute(accounting)
            + prefilling.attended_tokens,
            decode_attended_tokens=running.attended_tokens,
            step_times=step_times,
            work_in_flight=self._in_flight.work,
            first_prompt_tokens=prefilling.first_prompt_tokens,
            newest_wait_ms=1e3 * (now_s - self._newest_arrival_s(now_s)),
        )

    def _prefilling(self) -> _Unscheduled:
        tokens = attended = 0
        first: Request | None = None
        for request in self._running.prefilling:
            start, end = request.num_scheduled, request.prefill_end
            tokens += end - start
            if first is None or request.order < first.order:
                first = request
            if request.lease is None:
                attended += attended_tokens(start, end)
        return _Unscheduled(tokens, attended, 0 if first is None else first.remaining_prefill)

    def _newest_arrival_s(self, now_s: float) -> float:
        """The newest arrival among requests whose prompt is not scheduled whole; now if there are
        none."""
        newest = self._waiting.newest()
        if newest is None:
            newest = next(reversed(self._running.prefilling), None)
        return now_s if newest is None else newest.arrival_s
