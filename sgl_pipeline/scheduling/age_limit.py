"""Finds requests that have waited or run for too long, by looking at the oldest only.

It reads no clock and ends nothing itself.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.requests import FinishReason, Request, RequestState

# Upstream's messages (scheduler.py, _poll_timeout_aborts).
WAITED_TOO_LONG = FinishReason("abort", message="Request waiting timeout reached.", status_code=503)
RAN_TOO_LONG = FinishReason("abort", message="Request running timeout reached.", status_code=503)


class AgeLimit:
    """Requests in the order in which their time began; without a limit it holds none.

    Args:
        limit_s: seconds that a request may stay; None: for ever.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        # A plain dict's first key is slow to find after many have been taken from its front.
        self._started_s: OrderedDict[Request, float] = OrderedDict()

    def start(self, request: Request, now_s: float) -> None:
        """The time of `request` began at `now_s`, unless it runs already."""
        if self._limit_s is None or request in self._started_s:
            return
        # A request that was delayed on its way here may be older than others that are here already.
        younger = [
            other
            for other, _ in takewhile(
                lambda started: started[1] > now_s, reversed(self._started_s.items())
            )
        ]
        self._started_s[request] = now_s
        for other in reversed(younger):
            self._started_s.move_to_end(other)

    def stop(self, request: Request) -> None:
        """`request` has left, if it was here."""
        self._started_s.pop(request, None)

    def overdue(self, now_s: float) -> list[Request]:
        """Takes out and returns the requests whose time is over, the oldest first."""
        overdue: list[Request] = []
        while self._limit_s is not None and self._started_s:
            request, started_s = next(iter(self._started_s.items()))
            if now_s - started_s <= self._limit_s:
                break
            del self._started_s[request]
            overdue.append(request)
        return overdue


class RequestAges:
    """Waiting and running time of each request against its limits, in seconds."""

    def __init__(self, waiting_timeout_s: float | None, running_timeout_s: float | None) -> None:
        self._waiting = AgeLimit(waiting_timeout_s)
        self._running = AgeLimit(running_timeout_s)

    def waits(self, request: Request, since_s: float) -> None:
        """`request` is in the queue, or admitted without a chunk."""
        self._waiting.start(request, since_s)

    def retracted(self, requests: Sequence[Request], now_s: float) -> None:
        """`requests` went back to the queue; in a pause some may have ended since."""
        for request in requests:
            if request.state is RequestState.WAITING:
                self._waiting.start(request, now_s)

    def scheduled(self, chunks: Sequence[Chunk], now_s: float) -> None:
        """A step takes `chunks`, prefill last. A request waits until its first one: a time limit
        may admit one that it leaves no chunk."""
        for chunk in reversed(chunks):
            if chunk.is_decode:
                break
            self._waiting.stop(chunk.request)
            self._running.start(chunk.request, now_s)
            if chunk.request.started_s is None:
                chunk.request.started_s = now_s

    def ended(self, request: Request) -> None:
        self._waiting.stop(request)
        self._running.stop(request)

    def overdue(self, now_s: float) -> list[tuple[Request, FinishReason]]:
        """Removes and returns the requests whose time is over, each with its reason."""
        waited = [(request, WAITED_TOO_LONG) for request in self._waiting.overdue(now_s)]
        return waited + [(request, RAN_TOO_LONG) for request in self._running.overdue(now_s)]
