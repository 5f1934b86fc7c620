"""The only decision maker: which tokens of which requests run in which step.

It does no I/O, reads no clock, draws no random number and sees no tensor; equal calls give equal
steps. One step, from the arrival of its requests to its tokens:

    add(request):     refuse a known id, a request that can never fit, a full queue
                      queue it, register the pages that it wants in the radix tree
    next_microbatch:  return None while paused, or while the pipeline is full
                      retract requests that the head of the queue outranks by the threshold
                      budget = policy(load: waiting tokens, decodes, free pages, steps in flight)
                      chunks = decodes, then running prefills, then new requests, in order,
                               while the budget lasts and their pages fit
                      give the decodes drafts, if there are only decodes and it costs them little
                      while chunks are empty, no step is in flight and several requests run:
                               retract the last of them, decide again
                      return chunks, released pages, and pages to compute again, as a Microbatch
    on_result:        book the oldest step on its requests (`step_results.py`)
"""

from collections.abc import Sequence, Set

from sgl_pipeline.args import ACCOUNTINGS, Accounting, SchedulingArgs
from sgl_pipeline.errors import RequestError
from sgl_pipeline.microbatch import Chunk, Microbatch
from sgl_pipeline.requests import FinishReason, LogprobRows, Request, RequestState, TokenEvent
from sgl_pipeline.scheduling.entry_rules import DISPLACED
from sgl_pipeline.scheduling.explanation import Explanation
from sgl_pipeline.scheduling.offloaded_requests import leases_last
from sgl_pipeline.scheduling.outlook import Outlook
from sgl_pipeline.scheduling.recovery_log import RecoveryLog
from sgl_pipeline.scheduling.request_limits import RequestLimits
from sgl_pipeline.scheduling.scheduler_parts import build_parts
from sgl_pipeline.step_work import StepTimes
from sgl_pipeline.throttle import PipelineLoad, Policy, TokenBudget, limit_decodes


class StepScheduler:
    """Requests in, microbatches out, results in, token events out.

    Steps are FIFO through every stage. A decoding request is in at most one step in flight, a
    prefilling one may have consecutive chunks in several. Pages of a step in flight are never freed
    or evicted. Attribute `epoch` is the version of the StagePlan that new steps run under, and
    `step_times` predicts their times once these are known. `pausing` keeps steps from starting.
    `lost_pages` handles lost stages, when no step is in flight. `tier` keeps pages in a store, and
    for other servers. `drafts` guesses tokens. `state_slots` bound admission in models with
    states. `shares` is None where there is one tenant.

    Args:
        log: the pages that replaced stages can recompute by themselves; None: all lost tokens are
            prefilled again.
    """

    def __init__(
        self,
        args: SchedulingArgs,
        policy: Policy,
        *,
        num_pages: int,
        num_stages: int,
        context_length: int,
        log: RecoveryLog | None = None,
    ) -> None:
        self.epoch = 0
        self.step_times: StepTimes | None = None
        self.args = args
        self.use_policy(policy, args.accounting)
        self._now_s = 0.0
        self._requests: dict[str, Request] = {}
        parts = build_parts(
            args,
            num_pages=num_pages,
            num_stages=num_stages,
            context_length=context_length,
            log=log,
            finish=self._finish,
        )
        self._entry_rules, self._admission = parts.entry_rules, parts.admission
        self._waiting, self._running = parts.waiting, parts.running
        self._pages, self._in_flight = parts.pages, parts.in_flight
        self._preemption, self._decode_reserve = parts.preemption, parts.decode_reserve
        self._meter, self._explainer = parts.meter, parts.explainer
        self._results, self._ages = parts.results, parts.ages
        self.pausing, self.lost_pages = parts.pausing, parts.lost_pages
        self.tier, self.offloaded = parts.tier, parts.offloaded
        self.shares, self.drafts = parts.shares, parts.drafts
        self.state_slots = parts.state_slots

    def use_policy(self, policy: Policy, accounting: str) -> None:
        """Decides the next steps by `policy`, which sees what `accounting` counts."""
        self._policy = limit_decodes(policy, self.args.max_decodes_per_step)
        self._accounting = ACCOUNTINGS[accounting]

    # Requests in and out

    def add(self, request: Request) -> Request | None:
        """Queues a new request.

        Returns the waiting request of lower priority that was ended because the queue was full.
        Raises RequestError when it could never be served, QueueFullError when too many wait.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is already being served")
        displaced = self._entry_rules.displaced_by(request)
        if displaced is not None:
            self.abort(displaced.request_id, DISPLACED)
        self._entry_rules.give_place(request)
        self._requests[request.request_id] = request
        self._waiting.add(request)
        self._ages.waits(request, request.arrival_s)
        return displaced

    def check_arrival(self, request: Request, num_held: int) -> None:
        """Raises as `add` does, for a request that its caller keeps for now with `num_held` others.

        No request is displaced for it; `add` will look again.
        """
        self._entry_rules.check(request, num_held)

    def abort(self, request_id: str, reason: FinishReason) -> Request | None:
        """Ends a request in any state; None if it is not (or no longer) served.

        It gets no more tokens. Its pages come back with the last of its steps in flight.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.state is RequestState.WAITING:
            self._waiting.discard(request)
        else:
            self._pages.end_prefill(request)
        self._finish(request, reason)
        return request

    def end_overdue(self, now_s: float) -> list[Request]:
        """Ends the requests that have waited or run for too long; `Request.finish` has the reason.

        `now_s` is the clock of `Request.arrival_s`, in seconds.
        """
        return [
            request
            for request, reason in self._ages.overdue(now_s)
            if self.abort(request.request_id, reason) is not None
        ]

    # Steps out, results in

    def next_microbatch(self, now_s: float) -> Microbatch | None:
        """The next step; None when the pipeline is full or paused, or nothing can run.

        `now_s` is the caller's clock in seconds: ages of requests count from it.
        """
        if self.pausing.is_paused or self._in_flight.is_full:
            return None
        self._now_s = now_s
        load, budget, chunks = self._decide()
        # No chunk fits although requests run: they hold the pages that they need from each other.
        while not chunks and not self._in_flight and len(self._running) > 1:
            self._preemption.retract_last()
            load, budget, chunks = self._decide()
        self._ages.retracted(self._preemption.take_retracted(), now_s)
        self._ages.scheduled(chunks, now_s)
        if not chunks:
            wants_pages = self._running or self._waiting.head() is not None
            if not self._in_flight and (wants_pages or self.tier.only_saves):
                self.tier.note_starved(now_s)
            return None
        self.tier.note_step()
        released = self._pages.take_released()
        log = self.lost_pages.log
        replays = () if log is None else log.take_up(chunks, released)
        step = leases_last(chunks)
        microbatch = Microbatch(
            self._in_flight.next_id, self.epoch, load, budget, step, released, replays
        )
        if self.shares is not None:
            self.shares.charge(microbatch, self.step_times)
        self._decode_reserve.note_step(self._preemption.num_shortages)
        self._in_flight.add(microbatch)
        self.lost_pages.forget_displaced(now_s)
        return microbatch

    def _budget(self, load: PipelineLoad) -> TokenBudget:
        budget = self._policy(load)
        return budget if self.shares is None else self.shares.bounded(budget, load)

    def _decide(self) -> tuple[PipelineLoad, TokenBudget, list[Chunk]]:
        self._admission.make_room_for_head()
        load = self.load(self._accounting)
        budget = self._budget(load)
        chunks = self._admission.fill(budget)
        return load, budget, self.drafts.extend(chunks, load, budget)

    def on_result(
        self,
        step_id: int,
        token_ids: Sequence[int],
        now_s: float,
        logprobs: Sequence[LogprobRows] = (),
        lost_leases: Set[int] = frozenset(),
    ) -> list[TokenEvent]:
        """Applies the result of the oldest step in flight: every stage has run it.

        Args:
            step_id: the step.
            token_ids: the last stage's tokens, `Chunk.num_samples` of each chunk in order.
            now_s: the caller's clock in seconds.
            logprobs: the rows of each chunk whose request wants log-probabilities, in chunk order,
                taken apart where there are drafts (`Chunk.apart`).
            lost_leases: numbers of leases that some stage could not use.

        Raises ProtocolError when it is another step's turn or the number of tokens or rows is
        wrong.
        """
        events = self._results.take(step_id, token_ids, now_s, logprobs, lost_leases)
        self.pausing.retract_if_asked()
        return events

    def _finish(self, request: Request, reason: FinishReason) -> None:
        was_running = request.state is RequestState.RUNNING
        request.state = RequestState.FINISHED
        request.finish = reason
        del self._requests[request.request_id]
        self._ages.ended(request)
        self._running.drop(request)
        self.drafts.forget(request)
        end = None
        if was_running and request.steps_in_flight == 0:
            end = self._pages.release(request)
        if request.room is not None:
            self.tier.on_room_ended(request, end)
            self.offloaded.left(request)

    # When stages are lost, or others

    def forget_in_flight(self) -> None:
        """Takes back every step in flight, as if none had been decided: its stages are gone, or
        have orders to drop it.

        Where there are states, stages may have changed them in such steps, and the cache may have
        them now as snapshots: the caller loses all pages before a step is decided, as
        `LostPages.lose_stages` does without a log.
        """
        self.lost_pages.take_back_steps(self._in_flight)
        self._in_flight.forget()
        self.offloaded.retract_lost()
        self.pausing.retract_if_asked()

    def use_stages(self, num_stages: int, now_s: float) -> None:
        """`num_stages` stages run the next steps; none is in flight. The contents of all pages are
        lost, as by `LostPages.lose_all`."""
        assert not self._in_flight, "steps in flight are of other stages"
        self.lost_pages.use_stages(num_stages, now_s)
        self._in_flight.limit = num_stages + self.args.extra_steps_in_flight
        self._decode_reserve.pipeline_depth = self._in_flight.limit

    def use_pages(self, num_pages: int, log_pages: int, num_state_slots: int) -> list[Request]:
        """The stages now have `num_pages` pages and `num_state_slots` state slots, and their logs
        room for `log_pages` pages; if the number of pages or slots is new, all are empty
        (`use_stages`).

        Returns the requests that were ended because they would not fit even alone.
        """
        if self.lost_pages.log is not None:
            self.lost_pages.log.use_capacity(log_pages)
        if num_state_slots != self.state_slots.num_slots:
            self.state_slots.resize(num_state_slots)
        if num_pages == self._pages.num_pages:
            return []
        self._pages.resize(num_pages)
        self._entry_rules.limits = self.limits.with_pool(num_pages * self.args.page_size)
        refused = [(one, self.limits.refusal(one)) for one in self.requests()]
        unfit = [(request, reason) for request, reason in refused if reason is not None]
        for request, reason in unfit:
            self.abort(request.request_id, reason)
        return [request for request, _ in unfit]

    # Queries

    @property
    def limits(self) -> RequestLimits:
        """The lengths that every request must keep to."""
        return self._entry_rules.limits

    @property
    def next_step_id(self) -> int:
        """The id of the next step; all earlier ids are lower."""
        return self._in_flight.next_id

    @property
    def pipeline_depth(self) -> int:
        """Most steps in flight."""
        return self._in_flight.limit

    def load(self, accounting: Accounting = ACCOUNTINGS["radix"]) -> PipelineLoad:
        """The state of the whole system: as it is, or as `accounting` counts it for a policy."""
        return self._meter.read(accounting, self.step_times, self._now_s)

    def explain(self, request_id: str) -> Explanation | None:
        """Explains what the request waits for now; None if it is not (or no longer) served."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        budget = self._budget(self.load(self._accounting))
        return self._explainer.explain(request, budget, is_paused=self.pausing.is_paused)

    def outlook(self, request_id: str) -> Outlook | None:
        """The requests served before this one, and their demands; None as `explain`."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        return self._explainer.outlook(request, self.load(self._accounting), self._budget)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def queued_tokens(self) -> int:
        """Tokens to prefill of all waiting requests, cached tokens included."""
        return self._waiting.num_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_pages(self) -> int:
        """Pages that are not in use; further pages of `load().free_pages` hold the cache."""
        return self._pages.num_free

    def pages_in_use(self) -> list[int]:
        """Pages that hold anything, cached or of a request; looks at all."""
        return self._pages.pages_in_use()

    @property
    def num_decoding_tokens(self) -> int:
        """Tokens, of prompts and outputs, of all decoding requests."""
        return self._running.attended_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens since the start that the radix cache has served."""
        return self._admission.num_cached_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests that were admitted since the start."""
        return self._admission.num_prompt_tokens

    @property
    def num_retractions(self) -> int:
        return self._preemption.num_retractions

    def explain_queue(self, num_requests: int) -> list[tuple[Request, Explanation]]:
        """Explains the first waiting requests, in order; looks at the whole queue once."""
        budget = self._budget(self.load(self._accounting))
        return self._explainer.explain_first(num_requests, budget, is_paused=self.pausing.is_paused)

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not self._requests and not self._in_flight

    def requests(self) -> tuple[Request, ...]:
        """All waiting and running requests, in order of arrival."""
        return tuple(self._requests.values())

    def flush_cache(self) -> bool:
        """Empties the radix cache; refused (False) while any request is served. In a pause waiting
        requests do not count: they hold no pages."""
        is_unused = not self._running and not self._in_flight
        if not is_unused or (self._waiting and not self.pausing.is_paused):
            return False
        self.tier.interrupt()
        self._pages.clear_cache()
        return True

    def check_invariants(self) -> None:
        """Asserts what must hold after every call; for tests."""
        self._pages.check_conservation()
        self._pages.check_chunks(chunk for step in self._in_flight for chunk in step.chunks)
        assert len(self._requests) == len(self._waiting) + len(self._running)
        self._running.check_invariants()
