"""Predicts when a request will run: the queue, served in advance by the policy at the pace of
recent steps.

It is made when an operator asks. The queue, the policy and the pages are the scheduler's; the ends
of requests are guessed from the lengths of recent answers. It assumes no later arrival, no
retraction, and that the order stays what it is now: a cache-aware one changes with the cache. A
decode gives one token, because no request has drafts while another one waits; those in flight give
what their drafts are expected to. It reads no clock and changes nothing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sgl_pipeline.microbatch import Chunk, Microbatch
from sgl_pipeline.pipeline.budget_tokens import most_decodes, most_prefill_tokens, step_work
from sgl_pipeline.pipeline.output_lengths import OutputLengths, even_share
from sgl_pipeline.pipeline.step_pace import StepPace
from sgl_pipeline.requests import Request, RequestState
from sgl_pipeline.scheduling import Demand, Outlook
from sgl_pipeline.step_work import StepWork
from sgl_pipeline.throttle import PipelineLoad

# Most chunks that one forecast looks at: some milliseconds.
MAX_WORK = 16_000
# Fewest served requests of a queue from which its pace is taken.
MIN_SERVED = 4
_STEP_WORK = 40  # the cost of a step beside its chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForecast:
    """Seconds from now: `runs_in_s` until the request's first chunk is scheduled (0: it runs),
    `next_token_in_s` until its next token. None where it is unknown, for `reason`.

    It is based on `num_steps` recent steps and the lengths of `num_ended` recent answers. With
    `is_extrapolated` the queue is too long: only its beginning was served in advance.
    """

    runs_in_s: float | None = None
    next_token_in_s: float | None = None
    reason: str = ""
    num_steps: int = 0
    num_ended: int = 0
    is_extrapolated: bool = False


@dataclass(slots=True, eq=False)
class _Job:
    """A request on its way through the forecast."""

    request: Request
    prefill_tokens: int
    new_pages: int
    held_pages: float  # at its end
    output_left: int


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step in flight: the requests that draw a token in it, its work, its end."""

    drawing: tuple[_Job, ...]
    work: StepWork
    ends_s: float


class Forecaster:
    """Serves the queue of one `Outlook` in advance.

    Args:
        pace: of the recent steps.
        lengths: of recent answers.
        in_flight: the open steps, oldest first, each with the moment of its decision.
        expected_tokens: that a chunk in flight gives its request, with its drafts.
        last_end_s: end of the step before these.
        now_s: the clock of all moments.
    """

    def __init__(
        self,
        outlook: Outlook,
        pace: StepPace,
        lengths: OutputLengths,
        in_flight: Sequence[tuple[Microbatch, float]],
        expected_tokens: Callable[[Chunk], float],
        last_end_s: float,
        now_s: float,
    ) -> None:
        self._outlook = outlook
        self._pace = pace
        self._lengths = lengths
        self._start_s = self._now_s = now_s
        self._last_end_s = last_end_s
        self._jobs: dict[Request, _Job] = {}
        self._waiting = deque(self._job(one) for one in outlook.waiting)
        self._prefilling = deque(self._job(one) for one in outlook.prefilling)
        self._num_waiting = len(self._waiting)
        decoding = [self._job(one) for one in outlook.decoding]
        flying = {chunk.request for step, _ in in_flight for chunk in step.chunks}
        self._ready = deque(one for one in decoding if one.request not in flying)
        self._decoding = set(decoding)
        self._running = {*decoding, *self._prefilling}
        self._target = self._job(outlook.own)
        self._available = float(outlook.available_pages)
        self._waiting_tokens = outlook.load.waiting_tokens
        self._step_id = outlook.load.step_id
        self._flights: deque[_Flight] = deque()
        self._work = 0
        self._has_guessed = False
        self._first_ran_s: float | None = None  # the first of the queue
        # Moments at which the request ran and had its next token.
        self._ran_s: float | None = None if self._waiting else now_s
        self._token_s: float | None = None
        for microbatch, scheduled_s in in_flight:
            chunks = [
                chunk
                for chunk in microbatch.chunks
                if chunk.samples and chunk.request.state is RequestState.RUNNING
            ]
            drawing = tuple(
                self._job(Demand.in_flight(chunk.request, outlook.page_size)) for chunk in chunks
            )
            for job, chunk in zip(drawing, chunks, strict=True):
                # Beyond the one token that every step of a forecast gives.
                job.output_left = max(1, job.output_left + 1 - round(expected_tokens(chunk)))
            self._running.update(drawing)
            self._send(drawing, scheduled_s, microbatch.work)

    def run(self) -> RequestForecast:
        """Runs until the request's next token, or until that is unknown."""
        while self._token_s is None:
            if self._work > MAX_WORK:
                return self._extrapolated()
            if not self._decide() and not self._skip_rounds() and not self._take_oldest():
                return self._unknown(
                    "under the present rules, no running request makes room for it"
                )
            if self._ran_s is None and self._has_guessed and not self._lengths.num_ended:
                return self._unknown(
                    "it needs a running request to end, and none has ended in the recent steps, "
                    "so the length of answers is unknown"
                )
        assert self._ran_s is not None
        return self._result(self._ran_s - self._start_s, self._token_s - self._start_s)

    def _decide(self) -> bool:
        """Sends one step, if the pipeline has room and there is anything to send."""
        if len(self._flights) >= self._outlook.load.pipeline_depth:
            return False
        if not (self._ready or self._prefilling or self._may_admit()):
            return False  # whatever the policy would say
        load = self._load()
        budget = self._outlook.policy(load)
        decodes = min(most_decodes(budget, load), len(self._ready))
        drawing = [self._ready.popleft() for _ in range(decodes)]
        prefilled = self._prefill(most_prefill_tokens(budget, load, decodes), drawing)
        if not decodes + prefilled:
            return False
        self._send(tuple(drawing), self._now_s, step_work(load, decodes, prefilled))
        self._step_id += 1
        self._waiting_tokens -= prefilled
        self._available -= decodes / self._outlook.page_size
        return True

    def _load(self) -> PipelineLoad:
        """The load by now; prompts and contexts are as long in the mean as they were."""
        load, decoding = self._outlook.load, len(self._decoding)
        waiting = max(0, self._waiting_tokens)
        begun = self._prefilling[0].prefill_tokens if self._prefilling else 0
        return replace(
            load,
            step_id=self._step_id,
            waiting_tokens=waiting,
            waiting_attended_tokens=load.waiting_attended_tokens
            * waiting
            // max(1, load.waiting_tokens),
            prompts=len(self._waiting) + len(self._prefilling),
            first_prompt_tokens=min(waiting, begun),
            running_decodes=decoding,
            decode_attended_tokens=load.decode_attended_tokens
            * decoding
            // max(1, load.running_decodes),
            ready_decodes=len(self._ready),
            free_pages=min(load.total_pages, max(0, self._free_pages)),
            steps_in_flight=len(self._flights),
            work_in_flight=tuple(flight.work for flight in self._flights),
        )

    @property
    def _free_pages(self) -> int:
        """Free pages as the policy counts them, perhaps without cached ones."""
        outlook = self._outlook
        return outlook.load.free_pages + round(self._available) - outlook.available_pages

    def _prefill(self, left_tokens: int, drawing: list[_Job]) -> int:
        """Takes chunks as `Admission.fill`; a job that ends its prompt joins `drawing`."""
        given = 0
        while left_tokens > given:
            if not self._prefilling and not self._admit():
                break
            job = self._prefilling[0]
            length = min(left_tokens - given, job.prefill_tokens)
            given += length
            job.prefill_tokens -= length
            if job.prefill_tokens:
                break
            self._prefilling.popleft()
            drawing.append(job)
        return given

    def _may_admit(self) -> bool:
        """True if the head of the queue may run and its prefill fits."""
        num_running = len(self._running)
        if not self._waiting or num_running >= self._outlook.max_running_requests:
            return False
        return self._waiting[0].new_pages <= self._available - num_running

    def _admit(self) -> bool:
        """Admits the head of the queue, if it may be."""
        if not self._may_admit():
            return False
        job = self._waiting.popleft()
        self._available -= job.new_pages
        self._prefilling.append(job)
        self._running.add(job)
        if self._first_ran_s is None:
            self._first_ran_s = self._now_s
        if job is self._target:
            self._ran_s = self._now_s
        return True

    def _send(self, drawing: tuple[_Job, ...], scheduled_s: float, work: StepWork) -> None:
        ends_s = self._pace.ends_s(scheduled_s, self._last_end_s, work.tokens)
        self._last_end_s = max(ends_s, self._now_s)
        self._flights.append(_Flight(drawing, work, self._last_end_s))
        self._work += _STEP_WORK + len(drawing)

    def _skip_rounds(self) -> bool:
        """Skips to the end of the next answer, while the queue waits only for that.

        Without it, a long queue behind a few long answers would take too many steps to look at.
        """
        if not self._waiting or self._prefilling or self._decoding != self._running:
            return False
        rounds = min((job.output_left for job in self._running), default=0) - 2
        if rounds < 1 or len(self._flights) < min(
            self._outlook.load.pipeline_depth, len(self._running)
        ):
            return False
        flights = len(self._flights)
        tokens = -(-len(self._running) // flights)
        round_s = rounds * self._pace.round_s(flights, tokens)
        self._now_s += round_s
        self._last_end_s += round_s
        self._flights = deque(
            replace(flight, ends_s=flight.ends_s + round_s) for flight in self._flights
        )
        for job in self._running:
            job.output_left -= rounds
        self._step_id += rounds * flights
        self._available -= rounds * len(self._running) / self._outlook.page_size
        self._work += _STEP_WORK + len(self._running)
        return True

    def _take_oldest(self) -> bool:
        """The oldest step in flight ends; False without one."""
        if not self._flights:
            return False
        flight = self._flights.popleft()
        self._now_s = flight.ends_s
        for job in flight.drawing:
            if job is self._target:
                self._token_s = self._now_s
            job.output_left -= 1
            if job.output_left > 0:
                self._decoding.add(job)
                self._ready.append(job)
            else:
                self._decoding.discard(job)
                self._running.discard(job)
                self._available += job.held_pages
                self._has_guessed = True
        return True

    def _job(self, demand: Demand) -> _Job:
        """The one job of a request."""
        job = self._jobs.get(demand.request)
        if job is None:
            output_left = self._lengths.left(
                len(demand.request.output_ids),
                demand.request.stops.max_new_tokens,
                # Spread evenly: if all were of middling length, the first would end much too late.
                even_share(len(self._jobs)),
            )
            job = _Job(
                demand.request,
                max(1, demand.prefill_tokens),
                demand.new_pages,
                demand.held_pages + output_left / self._outlook.page_size,
                output_left,
            )
            self._jobs[demand.request] = job
        return job

    def _extrapolated(self) -> RequestForecast:
        """The queue goes on as it began; the time before its first admission does not count."""
        served = self._num_waiting - len(self._waiting)
        if self._ran_s is not None or served < MIN_SERVED or self._first_ran_s is None:
            return self._unknown(f"it is more than {MAX_WORK} chunks of work away")
        a_request_s = (self._now_s - self._first_ran_s) / (served - 1)
        ran_s = self._first_ran_s + a_request_s * (self._num_waiting - 1)
        return replace(self._result(ran_s - self._start_s, None), is_extrapolated=True)

    def _unknown(self, reason: str) -> RequestForecast:
        ran_s = self._ran_s
        runs_in_s = None if ran_s is None else ran_s - self._start_s
        return replace(self._result(runs_in_s, None), reason=reason)

    def _result(self, runs_in_s: float | None, next_token_in_s: float | None) -> RequestForecast:
        return RequestForecast(
            runs_in_s=runs_in_s,
            next_token_in_s=next_token_in_s,
            num_steps=self._pace.num_steps,
            num_ended=self._lengths.num_ended,
        )
