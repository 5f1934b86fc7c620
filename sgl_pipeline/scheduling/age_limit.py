"""Which requests have been somewhere for too long: the oldest is looked at, and nobody else.

Used by `StepScheduler`, once for waiting and once for running requests. It reads no clock and ends
nothing itself.
"""

from collections import OrderedDict
from itertools import takewhile

from sgl_pipeline.requests import Request


class AgeLimit:
    """Requests in the order in which their time began; without a limit it holds none.

    Args:
        limit_s: seconds that a request may stay; None: for ever.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        # A plain dict's first key is slow to find after many have been taken from its front.
        self._started_s: OrderedDict[Request, float] = OrderedDict()

    def start(self, request: Request, now: float) -> None:
        """The time of `request` began at `now`, unless it runs already."""
        if self._limit_s is None or request in self._started_s:
            return
        # Who was held up on the way here began before others that are here already.
        younger = [
            other
            for other, _ in takewhile(
                lambda started: started[1] > now, reversed(self._started_s.items())
            )
        ]
        self._started_s[request] = now
        for other in reversed(younger):
            self._started_s.move_to_end(other)

    def stop(self, request: Request) -> None:
        """`request` has left, if it was here."""
        self._started_s.pop(request, None)

    def overdue(self, now: float) -> list[Request]:
        """Takes out and returns the requests whose time is over, the oldest first."""
        overdue: list[Request] = []
        while self._limit_s is not None and self._started_s:
            request, started_s = next(iter(self._started_s.items()))
            if now - started_s <= self._limit_s:
                break
            del self._started_s[request]
            overdue.append(request)
        return overdue
