"""The order in which waiting requests are served.

`WaitingQueue` decides which of its requests may be served now; an order says which of these is
next. It never decides whether a request fits.
"""

import heapq
from collections.abc import Iterable
from typing import Protocol

from sgl_pipeline.requests import Request


class QueueOrder(Protocol):
    """The requests that may be served, and which of them is first."""

    def add(self, request: Request) -> None:
        """`request` may be served from now on."""

    def discard(self, request: Request) -> None:
        """`request` may not be served any more; without effect if it may not now."""

    def first(self) -> Request | None:
        """The request to serve next; it stays."""

    def serve(self, request: Request) -> None:
        """`request`, which is first, is served: it leaves."""

    def ranked(self, requests: Iterable[Request]) -> list[Request]:
        """`requests`, waiting ones that may be served or not, in the order in which they would be
        served if all could be now."""

    def why_before(self, first: Request, second: Request) -> str:
        """The reason why the waiting `first` is served before `second`, to follow its name; empty
        where `Request.order` alone says it."""


class FixedOrder:
    """By `Request.order`, which a request keeps for life."""

    def __init__(self) -> None:
        self._members: set[Request] = set()
        # Every member, and some that have left.
        self._heap: list[tuple[tuple[int, int, int], Request]] = []

    def add(self, request: Request) -> None:
        """`request` may be served from now on."""
        self._members.add(request)
        heapq.heappush(self._heap, (request.order, request))

    def discard(self, request: Request) -> None:
        """`request` may not be served any more; without effect if it may not now."""
        self._members.discard(request)
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(one.order, one) for one in self._members]
            heapq.heapify(self._heap)

    def first(self) -> Request | None:
        """The request to serve next; it stays."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def serve(self, request: Request) -> None:
        """`request`, which is first, is served: it leaves."""
        self.discard(request)

    def ranked(self, requests: Iterable[Request]) -> list[Request]:
        """`requests` in the order in which they would be served."""
        return sorted(requests, key=lambda request: request.order)

    def why_before(self, first: Request, second: Request) -> str:
        """Nothing: `Request.order` says it."""
        return ""
