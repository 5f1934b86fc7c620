"""The order of waiting requests by what the radix tree has of them: `lpm` and `dfs-weight`.

SGLang's `schedule_policy.py` sorts the whole queue before each step, by one of the two while at
most 128 wait. Here the first is known at any time (`prefix_ranking.py`). Upstream puts requests off
whose prefix an earlier one is about to compute; here `WaitingQueue` parks them.

Priorities come first. Among requests of one priority, the order holds within these bounds:

- A request is overtaken at most `max_overtakes` times, from the moment at which it may be served.
  Then it is next, after those before it in `Request.order`.
- A retracted request comes before all that have not run, and so does one with a lease: nearly
  nothing of it is left to compute here.

Retraction follows `Request.order` whatever the order here, and that never changes. So the first
running request in `Request.order` is never retracted for one of its priority, and it ends. Requests
that arrive later are behind it, so the pages of running requests always come back, and a request
that has become the next is admitted.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.args.scheduling_args import CACHE_AWARE_POLICIES
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.prefix_ranking import PrefixRanking, PrefixRankings
from sgl_pipeline.scheduling.queue_order import FixedOrder, QueueOrder
from sgl_pipeline.scheduling.radix_demand import RadixDemand
from sgl_pipeline.scheduling.radix_tree import RadixNode, RadixTree
from sgl_pipeline.scheduling.whole_ranking import bounded, by_longest_prefix, depth_first


class CacheOrders:
    """Makes orders over one tree, each of requests of its own.

    Args:
        depth_first: `dfs-weight`, not `lpm`.
        max_overtakes: later requests that are served before one that may be served.
    """

    def __init__(
        self, tree: RadixTree, demand: RadixDemand, *, depth_first: bool, max_overtakes: int
    ) -> None:
        self.rankings = PrefixRankings(tree)
        self.paths = demand.paths
        self.depth_first = depth_first
        self.max_overtakes = max_overtakes
        tree.on_split = self.rankings.on_split
        demand.on_changed = self.rankings.on_changed

    def new(self) -> "CacheOrder":
        """One without requests."""
        return CacheOrder(self)


def order_maker(
    args: SchedulingArgs, tree: RadixTree, demand: RadixDemand
) -> Callable[[], QueueOrder]:
    """Makes orders of `--schedule-policy` without requests; what `lof` adds is in
    `Request.order`."""
    if args.schedule_policy not in CACHE_AWARE_POLICIES:
        return FixedOrder
    depth_first = args.schedule_policy == "dfs-weight"
    orders = CacheOrders(tree, demand, depth_first=depth_first, max_overtakes=args.max_overtakes)
    return orders.new


class _Level:
    """The requests of one priority. `overtakers` is a heap of `Request.order`: of all that were
    served before the oldest request that may be served, though they came later."""

    def __init__(self, orders: CacheOrders) -> None:
        self._most = orders.max_overtakes
        self.ranking = PrefixRanking(orders.rankings, depth_first=orders.depth_first)
        self.arrivals = FixedOrder()
        self.overtakers: list[tuple[int, int, int]] = []

    def first(self) -> Request | None:
        """The request to serve next; it stays."""
        return self._overdue() or self.ranking.first()

    def serve(self, request: Request) -> None:
        """Takes out `request`, which was first."""
        if self._overdue() is None and not _is_urgent(request):
            self.ranking.go_on_from(request)
        if request is not self.arrivals.first():
            heapq.heappush(self.overtakers, request.order)

    def _overdue(self) -> Request | None:
        """The oldest request, if it may not be overtaken again. No other one was overtaken more
        often: whatever came after another one and was served came after the oldest, too."""
        oldest = self.arrivals.first()
        if oldest is None:
            return None
        while self.overtakers and self.overtakers[0] < oldest.order:
            heapq.heappop(self.overtakers)
        return oldest if len(self.overtakers) >= self._most else None


class CacheOrder:
    """By longest cached prefix or in depth-first order, as its `CacheOrders` says."""

    def __init__(self, orders: CacheOrders) -> None:
        self._orders = orders
        # By the first number of `Request.order`, which a priority determines; none is empty.
        self._levels: dict[int, _Level] = {}
        # Of all levels, and of some that are gone.
        self._heap: list[int] = []

    def add(self, request: Request) -> None:
        """`request` may be served from now on."""
        rank = request.order[0]
        level = self._levels.get(rank)
        if level is None:
            level = self._levels[rank] = _Level(self._orders)
            heapq.heappush(self._heap, rank)
        level.arrivals.add(request)
        path = self._orders.paths[request]
        level.ranking.add(request, path, is_urgent=_is_urgent(request))

    def discard(self, request: Request) -> None:
        """`request` may not be served any more; without effect if it may not now."""
        level = self._levels.get(request.order[0])
        if level is None:
            return
        level.arrivals.discard(request)
        level.ranking.discard(request)
        if not level.ranking:
            del self._levels[request.order[0]]

    def first(self) -> Request | None:
        """The request to serve next; it stays."""
        while self._heap and self._heap[0] not in self._levels:
            heapq.heappop(self._heap)
        return self._levels[self._heap[0]].first() if self._heap else None

    def serve(self, request: Request) -> None:
        """`request`, which is first, is served: it leaves."""
        self._levels[request.order[0]].serve(request)
        self.discard(request)

    def ranked(self, requests: Iterable[Request]) -> list[Request]:
        """`requests` in the order in which they would be served if nothing else came, was cached or
        evicted."""
        levels: dict[int, list[Request]] = {}
        for request in requests:
            levels.setdefault(request.order[0], []).append(request)
        return [one for rank in sorted(levels) for one in self._ranked_level(rank, levels[rank])]

    def _ranked_level(self, rank: int, requests: Sequence[Request]) -> list[Request]:
        level = self._levels.get(rank)
        urgent = sorted(filter(_is_urgent, requests), key=lambda one: one.order)
        paths = {one: self._orders.paths[one] for one in requests if not _is_urgent(one)}
        if self._orders.depth_first:
            walked = () if level is None else level.ranking.walked_nodes()
            by_prefix = depth_first(paths, frozenset(walked))
        else:
            by_prefix = by_longest_prefix(paths)
        overtakers = () if level is None else level.overtakers
        return bounded([*urgent, *by_prefix], overtakers, self._orders.max_overtakes)

    def why_before(self, first: Request, second: Request) -> str:
        """The reason why the waiting `first` is served before `second`, to follow its name; empty
        where `Request.order` alone says it."""
        if first.order[0] != second.order[0]:
            return ""
        if first.order < second.order:
            return self._why_earlier(first, second)
        if _is_urgent(first):
            return "has run before" if first.lease is None else "has its prompt computed"
        own, other = self._hit(second), self._hit(first)
        if self._orders.depth_first:
            return (
                f"goes on from a cached prefix of {other.end} tokens that more requests want, or "
                "that is served now"
            )
        return f"has a longer cached prefix ({other.end} tokens, this one {own.end})"

    def _why_earlier(self, first: Request, second: Request) -> str:
        if _is_urgent(first) or self._hit(first).end >= self._hit(second).end:
            return ""
        return (
            "came earlier, and none is overtaken more than "
            f"{self._orders.max_overtakes} times (--max-overtakes)"
        )

    def _hit(self, request: Request) -> RadixNode:
        return self._orders.paths[request].last_cached


def _is_urgent(request: Request) -> bool:
    return request.num_retractions > 0 or request.lease is not None
