"""The first by cached prefix is known at any time, and none is overtaken for ever."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pipelines import make_request
from support.radix import Radix

from sgl_pipeline.requests import Lease, Request
from sgl_pipeline.scheduling.cache_order import CacheOrder, CacheOrders
from sgl_pipeline.scheduling.prefix_ranking import _SPARE_ENTRIES


@dataclass(eq=False)
class Waiting:
    """One order and what waits in it. `overtakes` counts, for each request, the later ones of its
    priority that were served since it came."""

    order: CacheOrder
    requests: list[Request] = field(default_factory=list)
    overtakes: dict[Request, int] = field(default_factory=dict)


class Queues:
    """Several orders over one tree, without a pool or a scheduler."""

    def __init__(
        self,
        *,
        depth_first: bool,
        max_overtakes: int = 100,
        page_size: int = 1,
        num_orders: int = 1,
    ) -> None:
        self.radix = Radix(page_size)
        self.orders = CacheOrders(
            self.radix.tree,
            self.radix.demand,
            depth_first=depth_first,
            max_overtakes=max_overtakes,
        )
        self.depth_first, self.max_overtakes = depth_first, max_overtakes
        self.all = [Waiting(self.orders.new()) for _ in range(num_orders)]
        self.num_added = 0

    def add(
        self,
        tokens: list[int],
        *,
        priority: int = 0,
        waiting: Waiting | None = None,
        has_run: bool = False,
        lease: Lease | None = None,
    ) -> Request:
        request = make_request(str(self.num_added), tokens, priority=priority)
        request.num_retractions, request.lease = int(has_run), lease
        request.order = (-priority, 0, self.num_added)
        self.num_added += 1
        self.enter(request, waiting or self.all[0])
        return request

    def enter(self, request: Request, waiting: Waiting) -> None:
        path = self.radix.demand.want(request.prompt_ids)
        self.radix.demand.paths[request] = path
        waiting.order.add(request)
        waiting.requests.append(request)
        waiting.overtakes[request] = 0

    def leave(self, request: Request, waiting: Waiting) -> None:
        waiting.order.discard(request)
        waiting.requests.remove(request)
        self.radix.demand.unwant(self.radix.demand.paths.pop(request))

    def serve(self, waiting: Waiting | None = None) -> Request | None:
        waiting = waiting or self.all[0]
        request = waiting.order.first()
        if request is None:
            return None
        waiting.order.serve(request)
        self.leave(request, waiting)
        for other in waiting.requests:
            if other.order[0] == request.order[0] and other.order < request.order:
                waiting.overtakes[other] += 1
        return request

    def drain(self) -> list[str]:
        served = []
        while (request := self.serve()) is not None:
            served.append(request.request_id)
        return served

    def check(self) -> None:
        """All that must hold between two operations."""
        for waiting in self.all:
            ranked = waiting.order.ranked(waiting.requests)
            assert waiting.order.first() is (ranked[0] if ranked else None)
            assert sorted(ranked, key=lambda one: one.order) == sorted(
                waiting.requests, key=lambda one: one.order
            )
            for request in waiting.requests:
                assert waiting.overtakes[request] <= self.max_overtakes
            best = self.best_hit(waiting)
            if best is not None and not self.depth_first:
                assert waiting.order.first() is best

    def best_hit(self, waiting: Waiting) -> Request | None:
        """The longest prefix, found without the tree's nodes; None where another rule decides."""
        first = min((one.order[0] for one in waiting.requests), default=0)
        level = [one for one in waiting.requests if one.order[0] == first]
        oldest = min(level, key=lambda one: one.order, default=None)
        if oldest is None or any(one.num_retractions for one in level):
            return None
        if waiting.order._levels[first]._overdue() is not None:
            return oldest
        hits = {one: self.radix.matched(one.prompt_ids).end for one in level}
        return min(level, key=lambda one: (-hits[one], one.order))


@settings(deadline=None, max_examples=300)
@given(
    depth_first=st.booleans(),
    max_overtakes=st.integers(0, 5),
    page_size=st.sampled_from([1, 2]),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "serve", "serve", "again", "cache", "evict", "leave"]),
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
            st.integers(0, 7),
        ),
        max_size=60,
    ),
)
def test_the_first_is_that_of_the_whole_queue_and_none_is_overtaken_too_often(
    depth_first: bool,
    max_overtakes: int,
    page_size: int,
    operations: list[tuple[str, list[int], int]],
) -> None:
    queues = Queues(
        depth_first=depth_first, max_overtakes=max_overtakes, page_size=page_size, num_orders=2
    )
    for kind, tokens, number in operations:
        waiting = queues.all[number % 2]
        if kind == "add":
            queues.add(tokens, priority=number == 7, waiting=waiting)
        elif kind == "serve":
            queues.serve(waiting)
        elif kind == "again" and (request := queues.serve(waiting)) is not None:
            request.num_retractions += 1
            queues.enter(request, waiting)
        elif kind == "cache":
            queues.radix.put(tokens, 0)
        elif kind == "evict":
            queues.radix.storage.evict(number)
        elif waiting.requests:
            queues.leave(waiting.requests[number % len(waiting.requests)], waiting)
        queues.check()
        queues.radix.check_nodes()
    for waiting in queues.all:
        while queues.serve(waiting) is not None:
            queues.check()
    assert not queues.orders.rankings._places


def test_the_longest_cached_prefix_comes_first_and_follows_what_is_cached() -> None:
    queues = Queues(depth_first=False)
    for tokens in ([7, 7, 7], [1, 2, 3, 8], [1, 2, 9]):
        queues.add(tokens)
    order = queues.all[0].order
    assert [one.request_id for one in order.ranked(queues.all[0].requests)] == ["0", "1", "2"]
    queues.radix.put([1, 2, 3], 0)
    assert [one.request_id for one in order.ranked(queues.all[0].requests)] == ["1", "2", "0"]
    queues.radix.storage.evict(1)
    queues.radix.put([7], 3)
    assert [one.request_id for one in order.ranked(queues.all[0].requests)] == ["1", "2", "0"]
    queues.radix.storage.evict(9)
    assert queues.drain() == ["0", "1", "2"]


def test_a_branch_that_most_want_is_served_whole_though_it_shrinks() -> None:
    queues = Queues(depth_first=True)
    queues.radix.put([1, 1], 0)
    queues.radix.put([2, 2], 2)
    for first in (1, 2, 2, 1, 2, 3):
        queues.add([first, first, 10 + queues.num_added])
    assert queues.drain() == ["1", "2", "4", "0", "3", "5"]


def test_what_is_below_comes_before_what_ends_above() -> None:
    queues = Queues(depth_first=True)
    queues.radix.put([1, 2], 0)
    for tokens in ([1, 9], [1, 8], [1, 2, 3]):
        queues.add(tokens)
    assert queues.drain() == ["2", "0", "1"]


@pytest.mark.parametrize("depth_first", [False, True])
def test_a_request_is_overtaken_so_often_and_no_more(depth_first: bool) -> None:
    queues = Queues(depth_first=depth_first, max_overtakes=2)
    queues.radix.put([1, 1], 0)
    queues.add([5])
    for number in range(4):
        queues.add([1, 1, 10 + number])
    assert queues.drain() == ["1", "2", "0", "3", "4"]


@pytest.mark.parametrize("depth_first", [False, True])
def test_priorities_come_before_prefixes(depth_first: bool) -> None:
    queues = Queues(depth_first=depth_first)
    queues.radix.put([1, 1], 0)
    queues.add([1, 1, 2])
    queues.add([5], priority=1)
    assert queues.drain() == ["1", "0"]


@pytest.mark.parametrize("depth_first", [False, True])
def test_what_has_run_or_has_a_lease_comes_before_the_rest(depth_first: bool) -> None:
    queues = Queues(depth_first=depth_first)
    queues.radix.put([1, 1], 0)
    queues.add([1, 1, 2])
    queues.add([5], has_run=True)
    queues.add([6], lease=Lease("there", 1))
    assert queues.drain() == ["1", "2", "0"]


def test_the_reason_is_told() -> None:
    queues = Queues(depth_first=False, max_overtakes=1)
    queues.radix.put([1, 1], 0)
    cold, warm, later = queues.add([5]), queues.add([1, 1, 2]), queues.add([1, 1, 3])
    urgent = queues.add([6], has_run=True)
    order = queues.all[0].order
    assert order.why_before(warm, cold) == "has a longer cached prefix (2 tokens, this one 0)"
    assert order.why_before(warm, later) == ""
    assert order.why_before(urgent, cold) == "has run before"
    assert order.why_before(cold, later) == (
        "came earlier, and none is overtaken more than 1 times (--max-overtakes)"
    )
    other = queues.add([7], priority=3)
    assert order.why_before(other, cold) == ""


def test_a_change_costs_one_entry_a_node_however_many_wait_below() -> None:
    queues = Queues(depth_first=True)
    for number in range(50):
        queues.add([1, 2, 100 + number])
    (branch,) = queues.radix.tree.root.children.values()
    (places,) = (queues.orders.rankings._places[branch],)
    (place,) = places.values()
    before = len(place.entries)
    for _ in range(10 * _SPARE_ENTRIES):
        queues.radix.put([1, 2], 0)
        queues.radix.storage.evict(2)
    assert len(place.entries) == before
    assert place.parent is not None and len(place.parent.entries) <= _SPARE_ENTRIES + 3
