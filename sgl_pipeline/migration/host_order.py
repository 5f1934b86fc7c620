"""The order of hosts and the layer split with which a pipeline over their links is fastest.

A pipeline ends a step in every *period*: the longest of its slowest stage's time, its busiest
link's time, and the time of a round (all stages, all links, and the way of the results back to the
head) shared by the steps in flight. Neither matters alone: a far host costs a round, a narrow link
or a slow host each step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np

from sgl_pipeline.costs.stage_costs import StageCosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.migration.split_search import Matrix

# Up to this many hosts, every order is weighed; beyond, only the orders that exchanges find.
MOST_HOSTS_WEIGHED = 8
_HALVINGS = 40
_EQUAL = 1e-9
# In a split's sum of times: squares decide only between equal sums.
_EVENNESS = 1e-6

# Whether a stage of that host, the first or the last of the pipeline where so, can hold layers
# [start, end).
HostFits = Callable[[int, int, int], bool]


@dataclass(frozen=True, slots=True)
class Hop:
    """Between the stages of two hosts: the time that rows occupy the link, and their time to the
    other end."""

    busy_ms: float = 0.0
    transfer_ms: float = 0.0
    delay_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Route:
    """An order of hosts (their places in the input) and a split, with the times of each step.

    `period_ms` is the longest of `slowest_ms`, `busiest_ms` (of any link) and `round_ms` over the
    steps in flight.
    """

    order: tuple[int, ...]
    layer_counts: tuple[int, ...]
    slowest_ms: float
    busiest_ms: float
    round_ms: float
    period_ms: float


class RouteSearch:
    """Routes over given hosts. The first is the head, where every route begins.

    Args:
        costs: of a stage of each host.
        stages: number of stages on each host.
        hops: `hops[a][b]` from a stage of host `a` to one of host `b`.
        fits: whether a stage of a host can hold layers [start, end).
        steps_in_flight: most steps that are between the stages at once.
    """

    def __init__(
        self,
        costs: Sequence[StageCosts],
        stages: Sequence[int],
        hops: Sequence[Sequence[Hop]],
        fits: HostFits,
        steps_in_flight: int,
    ) -> None:
        self._costs = costs
        self._stages = stages
        self._hops = hops
        self._fits = fits
        self._steps_in_flight = steps_in_flight
        self._num_layers = len(costs[0].layers_ms)
        self._times: dict[tuple[int, bool, bool], Matrix] = {}

    def best(self) -> Route:
        """The route of the shortest period. Raises ConfigurationError if nothing fits."""
        routes = self._weighed() if len(self._costs) <= MOST_HOSTS_WEIGHED else self._exchanged()
        best: Route | None = None
        for floor_ms, order in routes:
            if best is not None and floor_ms >= best.period_ms - _EQUAL:
                break
            route = self.along(order)
            if route is not None and (best is None or route.period_ms < best.period_ms - _EQUAL):
                best = route
        if best is None:
            raise ConfigurationError(
                f"the {self._num_layers} layers do not fit into the hosts' memory, however they "
                "are ordered and split"
            )
        return best

    def along(self, order: Sequence[int]) -> Route | None:
        """The best split with the hosts in that order; None if none fits."""
        hosts = [host for host in order for _ in range(self._stages[host])]
        times = [
            self._run_times(host, stage == 0, stage == len(hosts) - 1)
            for stage, host in enumerate(hosts)
        ]
        busiest_ms, links_ms = self._links_ms(order)
        counts = self._best_split(times, busiest_ms, links_ms)
        if counts is None:
            return None
        ends = [0, *np.cumsum(counts)]
        stage_ms = [
            float(own[start, end]) for own, (start, end) in zip(times, pairwise(ends), strict=True)
        ]
        round_ms = sum(stage_ms) + links_ms
        period_ms = max(*stage_ms, busiest_ms, round_ms / self._steps_in_flight)
        return Route(tuple(order), counts, max(stage_ms), busiest_ms, round_ms, period_ms)

    def _links_ms(self, order: Sequence[int]) -> tuple[float, float]:
        """Time of the rows on the busiest link, and of a round on all links."""
        hops = [self._hops[one][other] for one, other in pairwise(order)]
        back_ms = self._hops[order[-1]][order[0]].delay_ms
        busiest_ms = max((hop.busy_ms for hop in hops), default=0.0)
        return busiest_ms, sum(hop.transfer_ms for hop in hops) + back_ms

    def _best_split(
        self, times: Sequence[Matrix], busiest_ms: float, links_ms: float
    ) -> tuple[int, ...] | None:
        """First the split with the fastest slowest stage; if the round takes longest, faster stages
        then get more layers for as long as it helps."""
        least_ms = _least_slowest(times)
        if not np.isfinite(least_ms):
            return None

        def within(limit_ms: float) -> tuple[tuple[int, ...], float]:
            counts, sum_ms = _least_sum(times, limit_ms * (1.0 + _EQUAL))
            return counts, max(busiest_ms, (sum_ms + links_ms) / self._steps_in_flight)

        counts, others_ms = within(least_ms)
        low_ms, high_ms = least_ms, others_ms
        for _ in range(_HALVINGS if high_ms > low_ms + _EQUAL else 0):
            limit_ms = (low_ms + high_ms) / 2
            tried, tried_ms = within(limit_ms)
            if tried_ms < others_ms - _EQUAL:
                counts, others_ms = tried, tried_ms
            if tried_ms > limit_ms:
                low_ms = limit_ms
            else:
                high_ms = limit_ms
        return counts

    def _run_times(self, host: int, is_first: bool, is_last: bool) -> Matrix:
        """`[start, end]`: time of layers [start, end) on a stage there; infinite where they do not
        fit or the range is empty."""
        key = (host, is_first, is_last)
        if key not in self._times:
            costs, count = self._costs[host], self._num_layers
            extra_ms = costs.embedding_ms * is_first + costs.head_ms * is_last
            ends_ms = np.concatenate([[0.0], np.cumsum(costs.layers_ms)])
            times = np.full((count + 1, count + 1), np.inf)
            for start in range(count):
                for end in range(start + 1, count + 1):
                    # A stage at an end of the pipeline has that end of the model.
                    is_in_place = (start == 0) == is_first and (end == count) == is_last
                    if is_in_place and self._fits(host, start, end):
                        times[start, end] = ends_ms[end] - ends_ms[start] + extra_ms
            self._times[key] = times
        return self._times[key]

    def _floor_ms(self, order: Sequence[int]) -> float:
        """No split makes the period of that order shorter."""
        busiest_ms, links_ms = self._links_ms(order)
        shared_ms = (links_ms + self._least_work_ms()) / self._steps_in_flight
        return max(busiest_ms, shared_ms)

    def _least_work_ms(self) -> float:
        """Time of all layers where they are computed fastest."""
        by_layer = zip(*(own.layers_ms for own in self._costs), strict=True)
        return float(sum(min(times) for times in by_layer))

    def _weighed(self) -> Iterable[tuple[float, tuple[int, ...]]]:
        """Every order, the most promising first."""
        rest = range(1, len(self._costs))
        orders = ((0, *others) for others in permutations(rest))
        return sorted((self._floor_ms(order), order) for order in orders)

    def _exchanged(self) -> Iterable[tuple[float, tuple[int, ...]]]:
        """The orders at the end of exchanges: beginning with the nearest host next, or as named,
        then runs of hosts are reversed (Croes 1958, 2-opt) while that helps."""
        starts = [tuple(range(len(self._costs))), self._nearest_next()]
        found = {self._turned(order) for order in starts}
        return sorted((self._floor_ms(order), order) for order in found)

    def _nearest_next(self) -> tuple[int, ...]:
        order, left = [0], set(range(1, len(self._costs)))
        while left:
            hops = self._hops[order[-1]]
            order.append(min(left, key=lambda host: (hops[host].transfer_ms, host)))
            left.remove(order[-1])
        return tuple(order)

    def _turned(self, order: tuple[int, ...]) -> tuple[int, ...]:
        while True:
            links = self._weight(order)
            turns = (
                (*order[:start], *reversed(order[start:end]), *order[end:])
                for start in range(1, len(order))
                for end in range(start + 2, len(order) + 1)
            )
            better = next((turn for turn in turns if self._weight(turn) < links), None)
            if better is None:
                return order
            order = better

    def _weight(self, order: Sequence[int]) -> tuple[float, float]:
        """A smaller weight is a better order, as far as links matter."""
        return self._floor_ms(order), self._links_ms(order)[1]


def _least_slowest(times: Sequence[Matrix]) -> float:
    slowest = times[0][0]
    for stage_times in times[1:]:
        slowest = np.maximum(slowest[:, None], stage_times).min(axis=0)
    return float(slowest[-1])


def _least_sum(times: Sequence[Matrix], limit_ms: float) -> tuple[tuple[int, ...], float]:
    """The split with the least sum of times among the splits within the limit, of which there must
    be one; of equal sums the most even one. Returns the sum too."""
    within = [
        np.where(own <= limit_ms, own + _EVENNESS * own**2 / limit_ms, np.inf) for own in times
    ]
    total = within[0][0]
    starts = []
    for costs in within[1:]:
        sums = total[:, None] + costs
        starts.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    end, ends = len(total) - 1, [len(total) - 1]
    for start_of in reversed(starts):
        end = int(start_of[end])
        ends.append(end)
    ends = [0, *reversed(ends)]
    sum_ms = sum(
        float(own[start, end]) for own, (start, end) in zip(times, pairwise(ends), strict=True)
    )
    return tuple(end - start for start, end in pairwise(ends)), sum_ms
