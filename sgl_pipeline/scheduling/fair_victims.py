"""Who gives pages and places up, where several tenants share them.

A tenant's share of the pages and of the places (`--max-running-requests`) is by its weight among
the tenants that run or wait. Inside one priority:

- Whoever holds more than his share gives to one who holds less, whatever came first, but never so
  much that he is left with less than his share. So an exchange is never undone, and no tenant
  loses the only request that it runs.
- Else, and inside one tenant, the later request in `Request.order` gives to the earlier one, but
  not from a tenant within its share to one above.

Each request that is retracted pays for a token of the request that takes its pages, or lets one
begin; where nothing can run, `Preemption.retract_last` follows `Request.order` alone. So there is
no deadlock and no livelock.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.tenants import Tenants
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue


@dataclass(slots=True)
class _Holding:
    """What one tenant holds now, and its shares; pages of a prefix that several requests use count
    for each."""

    num_requests: int
    num_pages: int
    share_requests: float
    share_pages: float

    def keeps_shares_without(self, request: Request, *, counts_places: bool) -> bool:
        """True if the tenant still runs anything without `request`, and has its share of the pages,
        and of the places where these are wanted."""
        return (
            self.num_requests > 1
            and self.num_pages - len(request.pages) >= self.share_pages
            and (not counts_places or self.num_requests - 1 >= self.share_requests)
        )


class FairVictims:
    """Looks at all running requests when it is asked: that is when something has run out.

    Args:
        max_running_requests: the places.
    """

    def __init__(
        self,
        tenants: Tenants,
        waiting: WaitingQueue,
        running: RunningRequests,
        pages: RequestPages,
        max_running_requests: int,
    ) -> None:
        self._tenants = tenants
        self._running = running
        self._waiting = waiting
        self._pages = pages
        self._max_running_requests = max_running_requests

    def last_behind(self, request: Request) -> Request | None:
        """The running request that gives pages to `request`, which runs and needs one more."""
        holdings = self._holdings(request)
        own = holdings[request.tenant]
        is_below = own.num_pages + 1 <= own.share_pages
        behind = []
        for one in self._idle(request):
            if one.order[0] != request.order[0] or one.tenant == request.tenant:
                gives = one.order > request.order
            elif is_below and holdings[one.tenant].keeps_shares_without(one, counts_places=False):
                gives = True
            else:
                other = holdings[one.tenant]
                is_protected = other.num_pages <= other.share_pages and not is_below
                gives = one.order > request.order and not is_protected
            if gives:
                behind.append(one)
        return max(behind, key=lambda one: self._place(one, holdings), default=None)

    def for_head(self, head: Request) -> list[Request]:
        """The running requests that must give up their places and pages so that `head`, the first
        that waits, can begin; empty if it has no right to them, or all together would not do.

        Only tenants that have had more service by weight than that of `head` give.
        """
        holdings = self._holdings(head)
        if len(holdings) == 1:
            return []
        own = holdings[head.tenant]
        num_pages = self._pages.missing_pages(head, self._waiting.path_of(head))
        begins = own.num_requests == 0
        if not begins and own.num_requests + 1 > own.share_requests:
            return []
        if not begins and own.num_pages + num_pages > own.share_pages:
            return []
        missing_pages = num_pages + self._running.num_growing - self._pages.num_available
        missing_places = len(self._running) + 1 - self._max_running_requests
        level = self._tenants.get(head.tenant).level
        givers = [
            one
            for one in self._idle(head)
            if one.tenant != head.tenant
            and one.order[0] >= head.order[0]
            and self._tenants.get(one.tenant).level > level
        ]
        victims: list[Request] = []
        while missing_pages > 0 or missing_places > 0:
            counts_places = missing_places > 0
            able = [
                one
                for one in givers
                if holdings[one.tenant].keeps_shares_without(one, counts_places=counts_places)
            ]
            if not able:
                return []
            victim = max(able, key=lambda one: self._place(one, holdings))
            givers.remove(victim)
            victims.append(victim)
            other = holdings[victim.tenant]
            other.num_requests -= 1
            other.num_pages -= len(victim.pages)
            missing_pages -= len(victim.pages) + 1  # and the page that is kept for its growth
            missing_places -= 1
        return victims

    def _place(
        self, request: Request, holdings: dict[str, _Holding]
    ) -> tuple[int, bool, tuple[int, int, int]]:
        """The order in which requests give, the highest first."""
        holding = holdings[request.tenant]
        return request.order[0], holding.num_pages > holding.share_pages, request.order

    def _idle(self, request: Request) -> Iterator[Request]:
        """The others that run, have no step in flight, and no lease: the single page of one with a
        lease comes back anyway."""
        return (
            one
            for one in self._running
            if not one.steps_in_flight and one.lease is None and one is not request
        )

    def _holdings(self, request: Request) -> dict[str, _Holding]:
        """Of all tenants that run or wait, and that of `request`."""
        names = {request.tenant, *(one.name for one in self._tenants.backlogged)}
        names.update(one.tenant for one in self._running)
        holdings = self._with_shares(names)
        for one in self._running:
            holding = holdings[one.tenant]
            holding.num_requests += 1
            holding.num_pages += len(one.pages)
        return holdings

    def _with_shares(self, names: Iterable[str]) -> dict[str, _Holding]:
        weights = {name: self._tenants.weight_of(name) for name in names}
        in_all = sum(weights.values())
        return {
            name: _Holding(
                0,
                0,
                self._max_running_requests * weight / in_all,
                self._pages.num_pages * weight / in_all,
            )
            for name, weight in weights.items()
        }
