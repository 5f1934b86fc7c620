"""The order of several tenants' requests against one that looks at all of them."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st
from support.pipelines import make_request

from sgl_pipeline.microbatch import Chunk, work_of
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.fair_order import FairOrder
from sgl_pipeline.scheduling.queue_order import FixedOrder
from sgl_pipeline.scheduling.tenants import Tenants

WEIGHTS = {"b": 3.0}


def request_of(number: int, tenant: str, priority: int = 0, length: int = 4) -> Request:
    request = make_request(str(number), [1] * length, tenant=tenant, priority=priority)
    request.order = (-priority, 0, number)
    return request


def serve(tenants: Tenants, request: Request) -> None:
    chunks = [Chunk(request, 0, len(request.prompt_ids), is_decode=False, samples=True)]
    tenants.charge(chunks, work_of(chunks), None)


def first_of(tenants: Tenants, waiting: Iterable[Request]) -> Request:
    """By looking at all."""
    return min(
        waiting,
        key=lambda one: (-one.priority, *tenants.get(one.tenant).rank, one.tenant, one.order),
    )


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.integers(0, 1), st.integers(1, 9)),
        st.tuples(st.sampled_from(["serve", "drop"]), st.just(""), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(OPERATIONS, st.integers(0, 5))
def test_the_first_is_of_the_tenant_with_the_least_virtual_time(
    operations: list[tuple[str, str, int, int]], place: int
) -> None:
    tenants = Tenants(WEIGHTS)
    order = FairOrder(tenants)
    waiting: list[Request] = []
    for number, (operation, tenant, priority, length) in enumerate(operations):
        if operation == "add":
            request = request_of(number, tenant, priority, length)
            waiting.append(request)
            order.add(request)
            order.add(request)  # it is there already
        elif waiting:
            request = waiting[place % len(waiting)] if operation == "drop" else order.first()
            assert request is not None
            waiting.remove(request)
            order.discard(request)
            order.discard(request)  # it is not there any more
            if operation == "serve":
                serve(tenants, request)
        found = order.first()
        if not waiting:
            assert found is None
            continue
        assert found is not None
        best = first_of(tenants, waiting)
        assert found.priority == best.priority
        assert tenants.get(found.tenant).rank == tenants.get(best.tenant).rank
        flow = (found.tenant, found.priority)
        own = [one for one in waiting if (one.tenant, one.priority) == flow]
        assert found.order == min(one.order for one in own)
        ranked = order.ranked(waiting)
        assert ranked[0] is found
        assert sorted(map(id, ranked)) == sorted(map(id, waiting))
        assert [-one.priority for one in ranked] == sorted(-one.priority for one in waiting)


def test_of_equal_tenants_the_first_is_the_one_that_ranks_first() -> None:
    order = FairOrder(Tenants(WEIGHTS))
    gone, *requests = (request_of(number, tenant) for number, tenant in enumerate("aca"))
    for request in (gone, *requests):
        order.add(request)
    order.discard(gone)
    assert order.ranked(requests)[0] is order.first() is requests[1]


def test_the_rank_tells_how_tenants_take_turns() -> None:
    order = FairOrder(Tenants(WEIGHTS))
    requests = [request_of(number, "a") for number in range(4)]
    requests += [request_of(4 + number, "b") for number in range(12)]
    for request in requests:
        order.add(request)
    ranked = [one.tenant for one in order.ranked(requests)]
    assert len(ranked) == 16
    for end in range(4, 17, 4):
        assert ranked[:end].count("a") in (end // 4, end // 4 + 1)


def test_each_tenants_own_order_is_the_callers() -> None:
    class Newest(FixedOrder):
        """The request that came last is first."""

        def add(self, request: Request) -> None:
            request.order = (request.order[0], 0, -request.order[2])
            super().add(request)

    order = FairOrder(Tenants({}), Newest)
    for number, tenant in enumerate("aabb"):
        order.add(request_of(number, tenant))
    first = order.first()
    assert first is not None and first.request_id == "1"


def test_a_tenant_of_which_nothing_may_be_served_is_not_in_the_way() -> None:
    order = FairOrder(Tenants({}))
    held, other = request_of(0, "a"), request_of(1, "b")
    order.add(held)
    order.discard(held)
    order.add(other)
    assert order.first() is other
    assert order.ranked([held, other]) in ([held, other], [other, held])


class TellingOrder(FixedOrder):
    """Keeps what it hears was served, and gives a reason."""

    def __init__(self) -> None:
        super().__init__()
        self.served: list[Request] = []

    def serve(self, request: Request) -> None:
        self.served.append(request)
        super().serve(request)

    def why_before(self, first: Request, second: Request) -> str:
        return "has a longer prefix"


def test_a_tenants_own_order_hears_what_is_served_and_says_why() -> None:
    own: list[TellingOrder] = []

    def make() -> TellingOrder:
        own.append(TellingOrder())
        return own[-1]

    order = FairOrder(Tenants({}), make)
    first, second, other = (request_of(n, tenant) for n, tenant in enumerate("aab"))
    for request in (first, second, other):
        order.add(request)
    assert order.why_before(second, first) == "has a longer prefix"
    assert order.why_before(other, first) == "", "tenants decide"
    order.serve(first)
    assert own[0].served == [first] and own[1].served == []
    assert order.ranked([second, other]) == [second, other] and order.first() in (second, other)
