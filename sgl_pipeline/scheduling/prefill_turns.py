"""The running prefills of several tenants, the one that goes on first at hand.

With many tenants hundreds of prompts are begun: to rank them all for each chunk would cost more
than the rest of a decision.
"""

from collections.abc import Callable

from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.fair_order import Rank
from sgl_pipeline.scheduling.least_first import LeastFirst
from sgl_pipeline.scheduling.running_requests import RunningRequests


class PrefillTurns:
    """Each prefill of `running` goes on once in a step, the lowest `rank` first. A rank may rise at
    any time."""

    def __init__(self, running: RunningRequests, rank: Callable[[Request], Rank]) -> None:
        self._running = running
        # When a step begins, prefills alone: what has left them would miss that its rank falls.
        # Some may leave while a step is put together.
        self._least: LeastFirst[Request] = LeastFirst(rank)
        self._rank = rank
        self._fallen: set[str] = set()

    def begin_anew(self) -> None:
        """All ranks may have fallen."""
        self._least = LeastFirst(self._rank)

    def fell(self, tenant: str) -> None:
        """The ranks of the requests of the tenant may have fallen."""
        self._fallen.add(tenant)

    def begin_step(self) -> None:
        """A step is put together: all may go on."""
        prefilling = self._running.prefilling
        for request in [one for one in self._least if one not in prefilling]:
            self._least.discard(request)
        for request in prefilling:
            if request not in self._least or request.tenant in self._fallen:
                self._least.add(request)
        self._fallen.clear()

    def first(self) -> Request | None:
        """The prefill that goes on next; None if all have gone on."""
        while (request := self._least.first()) is not None:
            if request in self._running.prefilling:
                return request
            self._least.discard(request)
        return None

    def went_on(self, request: Request) -> None:
        """The step that is put together has a chunk of `request`, or no room for one."""
        self._least.discard(request)
