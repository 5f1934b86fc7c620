"""Decides who gives pages and places up, where several tenants share them.

What a tenant holds is counted by weight: its running requests (of `--max-running-requests` places)
and their pages. Inside one priority:

- A tenant takes from another one that still holds as much as the taker afterwards, whatever came
  first, but not the first request that it runs. So each exchange makes them more equal and is never
  undone, and the first request of each tenant goes on.
- Else, and inside one tenant, the later request in `Request.order` gives to the earlier one, but
  not if its tenant holds less than the other.

Each request that is retracted pays for a token of the request that takes its pages, or lets one
begin; where nothing can run, `Preemption.retract_last` follows `Request.order` alone. So there is
no deadlock and no livelock.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.tenants import Tenants
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue


@dataclass(slots=True)
class _Holding:
    """The possessions of one tenant; pages of a prefix that several requests use count for each.
    `first` is the first in order of its running requests."""

    weight: float
    first: Request | None = None
    num_requests: int = 0
    num_pages: int = 0

    def places(self, change: int = 0) -> float:
        """Its running requests by weight, with `change` more."""
        return (self.num_requests + change) / self.weight

    def pages(self, change: int = 0) -> float:
        """Its pages by weight, with `change` more."""
        return (self.num_pages + change) / self.weight


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
        holdings = self._holdings()
        will_hold = holdings[request.tenant].pages(1)
        behind = []
        for one in self._idle(request):
            gives = one.order > request.order
            if one.order[0] == request.order[0] and one.tenant != request.tenant:
                other = holdings[one.tenant]
                keeps_as_much = other.pages(-len(one.pages)) >= will_hold
                gives = (keeps_as_much and one is not other.first) or (
                    gives and other.pages() >= will_hold
                )
            if gives:
                behind.append(one)
        return max(behind, key=lambda one: _place(one, holdings), default=None)

    def runs_another(self, head: Request) -> bool:
        """True if a request of another tenant than that of `head` runs."""
        return any(one.tenant != head.tenant for one in self._running)

    def for_head(self, head: Request) -> list[Request]:
        """The running requests that must give up their places and pages so that `head`, the first
        that waits, can begin; empty if it may not have them, or all together would not do.

        Only tenants whose turn is after that of the tenant of `head` give.
        """
        missing_places = len(self._running) + 1 - self._max_running_requests
        missing_places = max(missing_places, int(self._pages.state_slots.are_taken))
        if missing_places > 0 and not self._may_give_place(head):
            return []
        holdings = self._holdings()
        own = holdings.pop(head.tenant, _Holding(self._tenants.weight_of(head.tenant)))
        num_pages = self._pages.missing_pages(head, self._waiting.path_of(head))
        missing_pages = num_pages + self._running.num_growing - self._pages.num_available
        givers = self._givers(head, holdings)
        victims: list[Request] = []
        while missing_pages > 0 or missing_places > 0:
            able = [
                one
                for one in givers
                if holdings[one.tenant].pages(-len(one.pages)) >= own.pages(num_pages)
                and (missing_places <= 0 or holdings[one.tenant].places(-1) >= own.places(1))
            ]
            if not able:
                return []
            victim = max(able, key=lambda one: _place(one, holdings))
            givers.remove(victim)
            victims.append(victim)
            holdings[victim.tenant].num_requests -= 1
            holdings[victim.tenant].num_pages -= len(victim.pages)
            missing_pages -= len(victim.pages) + 1  # and the page that is kept for its growth
            missing_places -= 1
        return victims

    def _givers(self, head: Request, holdings: dict[str, _Holding]) -> list[Request]:
        """The running requests of other tenants that may give to `head` at all."""
        rank = self._tenants.get(head.tenant).rank
        return [
            one
            for one in self._idle(head)
            if one.tenant != head.tenant
            and one is not holdings[one.tenant].first
            and one.order[0] >= head.order[0]
            and self._tenants.get(one.tenant).rank > rank
        ]

    def _may_give_place(self, head: Request) -> bool:
        """True if some tenant runs enough requests to give a place to that of `head`. Where places
        have run out this is what mostly says no, in a fraction of the time of `_holdings`."""
        weight_of = self._tenants.weight_of
        counts = Counter([one.tenant for one in self._running])
        will_hold = (counts.pop(head.tenant, 0) + 1) / weight_of(head.tenant)
        return any(
            count > 1 and (count - 1) / weight_of(name) >= will_hold
            for name, count in counts.items()
        )

    def _idle(self, request: Request) -> Iterator[Request]:
        """The others that run, have no step in flight, and no lease: the single page of one with a
        lease comes back anyway."""
        return (
            one
            for one in self._running
            if not one.steps_in_flight and one.lease is None and one is not request
        )

    def _holdings(self) -> dict[str, _Holding]:
        """The possessions of each tenant that runs anything."""
        holdings: dict[str, _Holding] = {}
        for one in self._running:
            holding = holdings.get(one.tenant)
            if holding is None:
                weight = self._tenants.weight_of(one.tenant)
                holding = holdings[one.tenant] = _Holding(weight)
            holding.num_requests += 1
            holding.num_pages += len(one.pages)
            if holding.first is None or one.order < holding.first.order:
                holding.first = one
        return holdings


def _place(
    request: Request, holdings: dict[str, _Holding]
) -> tuple[int, float, tuple[int, int, int]]:
    """The order in which requests give, the highest first: of the lowest priority, of the tenant
    that holds most, the last."""
    return request.order[0], holdings[request.tenant].pages(), request.order
