"""Requests whose keys and values stay on the server that has computed their prompts.

Such a request has a lease there (`wire/lease_orders.py`) and one page here, for the rows of its
steps; everything else of it runs here. It waits, runs and ends as any other. Where the lease is
over, a waiting request is held again as before, and a running one is retracted: it computes its
prompt and its output here.
"""

from collections.abc import Iterable, Iterator, Sequence, Set

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.requests import Lease, Request, RequestState
from sgl_pipeline.scheduling.arrivals_from_peers import ArrivalsFromPeers
from sgl_pipeline.scheduling.preemption import Preemption
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue


def leases_last(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """`chunks` as a step has them: those with a lease come last."""
    leased = [chunk for chunk in chunks if chunk.request.lease is not None]
    if not leased:
        return tuple(chunks)
    return (*(chunk for chunk in chunks if chunk.request.lease is None), *leased)


class OffloadedRequests:
    """All requests with a lease, waiting or running.

    A driver calls `take_ended`.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningRequests,
        preemption: Preemption,
        arrivals: ArrivalsFromPeers,
    ) -> None:
        self._waiting, self._running = waiting, running
        self._preemption, self._arrivals = preemption, arrivals
        self._requests: dict[Request, None] = {}
        # Running ones whose lease is over; each is retracted when its steps have come back.
        self._lost: set[Request] = set()

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self._requests if request.lease is not None)

    @property
    def has_ended(self) -> bool:
        """True if `take_ended` has something."""
        return bool(self._preemption.ended_leases)

    def take_ended(self) -> list[tuple[Request, Lease]]:
        """Requests that were retracted since the last call, each with the lease that it had."""
        ended = self._preemption.ended_leases[:]
        self._preemption.ended_leases.clear()
        for request, _ in ended:
            self.left(request)
        return ended

    def begin(self, request: Request, lease: Lease, num_tokens: int) -> None:
        """The held `request` has a lease, with the keys and values of its first `num_tokens`
        tokens: it waits for its turn from now on."""
        self._requests[request] = None
        self._waiting.use_lease(request, lease, num_tokens)
        self._arrivals.leave_there(request)

    def end(self, request: Request) -> None:
        """The lease of `request`, which waits or runs, is over."""
        if request.state is RequestState.WAITING:
            del self._requests[request]
            self._waiting.use_lease(request, None, 0)
            self._arrivals.hold_again(request)
            return
        self._lost.add(request)
        self._running.stop_prefill(request)
        self.retract_lost()

    def end_last(self) -> None:
        """Ends the lease of the running request that is served last, if one runs."""
        running = (one for one in self if one.state is RequestState.RUNNING)
        request = max(running, key=lambda one: one.order, default=None)
        if request is not None:
            self.end(request)

    def lose(self, chunks: Iterable[Chunk], numbers: Set[int]) -> None:
        """A step with `chunks` has come back, in which the leases `numbers` could not be used: what
        their rows have become has no meaning."""
        for chunk in chunks:
            request, lease = chunk.request, chunk.request.lease
            if lease is None or lease.number not in numbers:
                continue
            if request.state is RequestState.RUNNING:
                self._lost.add(request)
                self._running.stop_prefill(request)

    def is_lost(self, request: Request) -> bool:
        """True if nothing of the steps of `request` counts any more."""
        return request in self._lost

    def retract_lost(self) -> None:
        """To be called when steps have left the pipeline."""
        for request in [one for one in self._lost if not one.steps_in_flight]:
            self._preemption.retract(request)
            self._lost.discard(request)

    def left(self, request: Request) -> None:
        """`request` has ended, or has no lease any more."""
        self._requests.pop(request, None)
        self._lost.discard(request)
