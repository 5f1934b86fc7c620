"""Fills a `TokenBudget` with chunks: decodes, then running prefills, then new requests.

The budget limits how much, the order of requests decides who is next, and the free pages decide
whether a request fits. Where tenants have shares, a new request of one may come before a running
prefill of another. Admission does not depend on the reasons for the budget.
"""

from collections.abc import Callable

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.requests import Request, RequestState
from sgl_pipeline.scheduling.fair_shares import FairShares
from sgl_pipeline.scheduling.held_pages import HeldPages
from sgl_pipeline.scheduling.preemption import Preemption
from sgl_pipeline.scheduling.prefill_room import PrefillRoom
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue
from sgl_pipeline.throttle import DecodeShare, TokenBudget


class Admission:
    """Chooses the chunks of one step and books them on their requests."""

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningRequests,
        pages: RequestPages,
        preemption: Preemption,
        max_running_requests: int,
        preemption_threshold: int | None = None,
        on_admitted: Callable[[Request], None] = lambda request: None,
        held: HeldPages | None = None,
        shares: FairShares | None = None,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._pages = pages
        self._preemption = preemption
        self._max_running_requests = max_running_requests
        self._preemption_threshold = preemption_threshold
        self._on_admitted = on_admitted
        self._held = held
        self._shares = shares
        # Of all requests admitted so far, each counted once.
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def fill(self, budget: TokenBudget) -> list[Chunk]:
        """The chunks of the next step, decodes first; empty when nothing can run now."""
        chunks = self._chunks(budget)
        if self._pages.snapshots is not None:
            self._pages.snapshots.end_step()
        return chunks

    def _chunks(self, budget: TokenBudget) -> list[Chunk]:
        chunks = self._decodes(budget.decodes, budget.time.decodes if budget.time else None)
        room = PrefillRoom(budget, chunks)
        if self._shares is not None:
            self._prefill_fairly(self._shares, room, chunks)
            return chunks
        for request in sorted(self._running.prefilling, key=lambda request: request.order):
            self._prefill(request, room, chunks)
        while room.is_open and (newcomer := self._admit_next()) is not None:
            self._prefill(newcomer, room, chunks)
        return chunks

    def _prefill_fairly(self, shares: FairShares, room: PrefillRoom, chunks: list[Chunk]) -> None:
        """Fills the rest of the step, chunk by chunk, from the tenant that is behind most: from a
        prefill that runs, else from a new request. If that one does not fit, none is admitted."""
        turns = shares.turns
        turns.begin_step()
        may_admit = True
        while room.is_open:
            running = turns.first()
            head = self._waiting.head() if may_admit else None
            if head is not None and shares.goes_first(head, running):
                request = self._admit_next()
                if request is None:
                    may_admit = False
                    continue
                if shares.tenants.has_saved(request.tenant):
                    room.stretch(_seen(request), request.remaining_prefill)
            elif running is not None:
                turns.went_on(running)
                request = running
            else:
                return
            start = request.num_scheduled
            self._prefill(request, room, chunks)
            shares.expect(request, start)

    def _decodes(self, limit: int, share: DecodeShare | None) -> list[Chunk]:
        chunks: list[Chunk] = []
        ready = self._running.ready
        snapshots = self._pages.snapshots
        interval = 0 if snapshots is None else snapshots.interval
        taken_ms = 0.0
        for request in list(ready):
            if len(chunks) == limit:
                break
            if share is not None:
                own_ms = share.row_ms
                if request.lease is None:
                    own_ms += share.attended_ms * request.num_tokens
                # To the nearest number of decodes, and at least one.
                if chunks and taken_ms + own_ms / 2 > share.share_ms:
                    break
                taken_ms += own_ms
            # An earlier decode may have retracted it.
            if request in ready and self._preemption.extend(request, request.num_scheduled + 1):
                start = request.num_scheduled
                request.num_scheduled = start + 1
                request.steps_in_flight += 1
                self._running.start_decode(request)
                may_leave = interval and start % interval == 0
                source = self._pages.leave_state(request) if may_leave else None
                chunks.append(Chunk(request, start, 1, True, True, state_source=source))
        return chunks

    def _prefill(self, request: Request, room: PrefillRoom, chunks: list[Chunk]) -> None:
        """Appends the longest chunk that budget and pages allow."""
        seen = _seen(request)
        length = room.chunk_length(seen, request.remaining_prefill)
        length = min(length, self._pages.reachable_tokens(request) - request.num_scheduled)
        if length <= 0:
            return
        extended = self._pages.extend(request, request.num_scheduled + length)
        assert extended
        start = request.num_scheduled
        request.num_scheduled = end = start + length
        request.steps_in_flight += 1
        if not request.is_prefilling:
            self._running.start_last_prefill(request)
        # A request for no tokens may ask for the log-probabilities of the next one: it is drawn
        # with them and dropped.
        draws = request.stops.max_new_tokens > 0 or request.logprobs is not None
        samples = end == request.num_tokens and draws
        source, snapshots = self._pages.states_of_chunk(request, start, end)
        chunks.append(Chunk(request, start, length, False, samples, (), source, snapshots))
        room.take(seen, length, samples)

    def make_room_for_head(self) -> None:
        """Retracts requests that the head of the queue outranks by more than the threshold, the
        last first, until it could be admitted (upstream: schedule_policy.py, preempt_to_schedule).

        Must run before the budget is set: a budget is a share of waiting and decoding requests, and
        this changes both.
        """
        if self._must_wait_for_readers:
            return
        if self._shares is not None:
            self._make_room_by_shares(self._shares)
        threshold = self._preemption_threshold
        if threshold is None:
            return
        head = self._waiting.head()
        while head is not None and not self._could_admit(head):
            victim = self._preemption.last_idle()
            if victim is None or victim.order[0] - head.order[0] <= threshold:
                return
            self._preemption.retract(victim)

    def _make_room_by_shares(self, shares: FairShares) -> None:
        """Retracts requests of tenants that have and had more for the head of the queue."""
        head, victims = self._waiting.head(), shares.victims
        if head is None or not victims.runs_another(head) or self._could_admit(head):
            return
        for victim in victims.for_head(head):
            self._preemption.retract(victim)

    @property
    def _must_wait_for_readers(self) -> bool:
        return self._held is not None and self._held.is_full

    def _could_admit(self, head: Request) -> bool:
        return len(self._running) < self._max_running_requests and self._pages.fits(
            head, self._waiting.path_of(head), num_reserved=self._running.num_growing
        )

    def _admit_next(self) -> Request | None:
        """Admits the head of the queue if its whole prefill fits, else no request.

        One page for each running request that may grow stays out of reach: without it, decodes that
        are about to need their next page would retract the newcomer at once.
        """
        if len(self._running) >= self._max_running_requests:
            return None
        if self._must_wait_for_readers:
            return None
        request = self._waiting.head()
        if request is None:
            return None
        path = self._waiting.path_of(request)
        if not self._pages.try_open(request, path, num_reserved=self._running.num_growing):
            return None
        self._waiting.pop_head()
        self._running.admit(request)
        request.state = RequestState.RUNNING
        if request.num_retractions == 0:
            request.cached_tokens = num_cached = request.num_computed
            if request.peer_cached_tokens is not None:
                request.cached_tokens = request.peer_cached_tokens
            # What was loaded for it may have been evicted since.
            request.loaded_tokens = min(request.loaded_tokens, request.cached_tokens)
            self.num_prompt_tokens += len(request.prompt_ids)
            self.num_cached_tokens += num_cached - request.leased_tokens
        self._on_admitted(request)
        return request


def _seen(request: Request) -> int:
    """Tokens that the next chunk attends to here: those of a lease are attended to elsewhere."""
    return 0 if request.lease is not None else request.num_scheduled
