"""Takes pages from the requests that are served last, when one before them needs some.

Pages are taken for decodes, for requests of much higher priority, and when running requests hold
the pages that they need from each other. A request is retracted only for one before it in
`Request.order`, so the first request always makes progress: no deadlock, no livelock. That does not
depend on the order of admission (`cache_order.py`). Where tenants share pages, `fair_victims.py`
says who gives. It never touches a request with a step in flight.
"""

from sgl_pipeline.requests import Lease, Request, RequestState
from sgl_pipeline.scheduling.fair_victims import FairVictims
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue


class Preemption:
    """Retracts running requests: what they computed is cached and may be found again or evicted."""

    def __init__(
        self,
        running: RunningRequests,
        waiting: WaitingQueue,
        pages: RequestPages,
        victims: FairVictims | None = None,
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._pages = pages
        self._victims = victims
        self.num_retractions = 0
        # Retractions because pages ran out; other retractions made room for a higher priority.
        self.num_shortages = 0
        self._retracted: list[Request] = []
        # Of requests that were retracted.
        self.ended_leases: list[tuple[Request, Lease]] = []

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Allocates pages for `num_tokens` tokens of `request`, at the cost of later requests.

        False when even that was not enough: then it keeps what it has and waits for its turn.
        """
        while not self._pages.extend(request, num_tokens):
            victim = self._last_behind(request)
            if victim is None:
                return False
            self.num_shortages += 1
            self.retract(victim)
        return True

    def _last_behind(self, request: Request) -> Request | None:
        """The request to take pages from for one before it. Not one with a lease: its single page
        comes back anyway, because nothing keeps it from going on."""
        if self._victims is not None:
            return self._victims.last_behind(request)
        behind = (
            one
            for one in self._running
            if not one.steps_in_flight and one.order > request.order and one.lease is None
        )
        return max(behind, key=lambda one: one.order, default=None)

    def retract_last(self) -> None:
        """Retracts the last running request in order; none may have a step in flight."""
        victim = self.last_idle()
        assert victim is not None
        self.num_shortages += 1
        self.retract(victim)

    def retract(self, request: Request) -> None:
        """Sends a running request back to the queue, to prefill its prompt and output again."""
        self._pages.release(request)
        self._running.drop(request)
        if request.lease is not None:
            self.ended_leases.append((request, request.lease))
            request.lease, request.leased_tokens = None, 0
        request.state = RequestState.WAITING
        request.num_scheduled = request.num_computed = 0
        request.prefill_end = request.num_tokens
        request.num_retractions += 1
        self.num_retractions += 1
        self._retracted.append(request)
        self._waiting.add(request)

    def take_retracted(self) -> list[Request]:
        """The requests retracted since the last call."""
        retracted, self._retracted = self._retracted, []
        return retracted

    def last_idle(self) -> Request | None:
        """The running request that is served last, of those without a step in flight."""
        idle = (request for request in self._running if not request.steps_in_flight)
        return max(idle, key=lambda request: request.order, default=None)
