"""The order of waiting requests of several tenants: by priority, then by tenant, then the tenant's
own order."""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.least_first import Key, LeastFirst
from sgl_pipeline.scheduling.queue_order import FixedOrder, QueueOrder
from sgl_pipeline.scheduling.tenants import Tenant, Tenants

# Compares requests, which wait or run; the lower is served sooner.
Rank = tuple[int, float, int, str, tuple[int, int, int]]


@dataclass(slots=True, eq=False)
class _Flow:
    """The requests of one tenant with one priority."""

    tenant: Tenant
    priority: int
    order: QueueOrder
    num_requests: int = 0

    @property
    def key(self) -> Key:
        return (-self.priority, *self.tenant.rank)


class FairOrder:
    """A `QueueOrder`: the highest priority first, of that the tenant with the least virtual time,
    of its requests the one that its own order has first.

    Args:
        tenants: told which requests wait; belongs to no other order.
        own_order: makes the order of the requests of one tenant and one priority.
    """

    def __init__(self, tenants: Tenants, own_order: Callable[[], QueueOrder] = FixedOrder) -> None:
        self._tenants = tenants
        self._own_order = own_order
        self._flow_of: dict[Request, _Flow] = {}
        self._flows: dict[tuple[str, int], _Flow] = {}
        self._flows_of: dict[Tenant, list[_Flow]] = {}
        self._least: LeastFirst[_Flow] = LeastFirst(lambda flow: flow.key)
        # Hears of tenants of which requests that wait or run may have a lower rank than before.
        self.on_fell: Callable[[str], None] = lambda tenant: None
        tenants.on_fell = self._fell

    def add(self, request: Request) -> None:
        """`request` may be served from now on."""
        if request in self._flow_of:
            return
        tenant = self._tenants.begins_to_wait(request.tenant)
        name = (request.tenant, request.priority)
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = _Flow(tenant, request.priority, self._own_order())
            self._flows_of.setdefault(tenant, []).append(flow)
            self._least.add(flow)
        self._flow_of[request] = flow
        flow.num_requests += 1
        flow.order.add(request)

    def discard(self, request: Request) -> None:
        """`request` may not be served any more; without effect if it may not now."""
        flow = self._flow_of.pop(request, None)
        if flow is None:
            return
        flow.order.discard(request)
        flow.num_requests -= 1
        tenant = flow.tenant
        if not flow.num_requests:
            del self._flows[tenant.name, flow.priority]
            self._least.discard(flow)
            self._flows_of[tenant].remove(flow)
            if not self._flows_of[tenant]:
                del self._flows_of[tenant]
        self._tenants.ends_to_wait(tenant)

    def first(self) -> Request | None:
        """The request to serve next; it stays."""
        flow = self._least.first()
        return None if flow is None else flow.order.first()

    def serve(self, request: Request) -> None:
        """`request`, which is first, is served: it leaves."""
        self._flow_of[request].order.serve(request)
        self.discard(request)

    def why_before(self, first: Request, second: Request) -> str:
        """The reason why the waiting `first` is served before `second` of its tenant; empty for
        another's."""
        flow = self._flow_of.get(first)
        if flow is None or (first.tenant, first.priority) != (second.tenant, second.priority):
            return ""
        return flow.order.why_before(first, second)

    def rank(self, request: Request) -> Rank:
        """The place of `request` among those of all tenants."""
        return (-request.priority, *self._tenants.get(request.tenant).rank, request.order)

    def ranked(self, requests: Iterable[Request]) -> list[Request]:
        """`requests`, waiting ones that may be served or not, in the order in which they would be
        served if all could be now, and each prompt took what it is expected to take."""
        by_flow: dict[tuple[str, int], list[Request]] = {}
        for request in requests:
            by_flow.setdefault((request.tenant, request.priority), []).append(request)
        ranks: dict[str, tuple[float, int, str]] = {}
        # One of a tenant and a priority, so that no two are equal before their requests.
        heap: list[tuple[int, float, int, str, list[Request]]] = []
        for (name, priority), own in by_flow.items():
            flow = self._flows.get((name, priority))
            order = self._own_order() if flow is None else flow.order
            ranks[name] = rank = self._tenants.get(name).rank
            heap.append((-priority, *rank, order.ranked(own)[::-1]))
        heapq.heapify(heap)
        ranked: list[Request] = []
        while heap:
            lowest, level, last_served, name, own = heapq.heappop(heap)
            if (level, last_served, name) != ranks[name]:  # served with another priority since
                heapq.heappush(heap, (lowest, *ranks[name], own))
                continue
            request = own.pop()
            ranked.append(request)
            tenant = self._tenants.get(name)
            level += self._tenants.prompt_level(tenant, request.prefill_end)
            ranks[name] = rank = (level, last_served, name)
            if own:
                heapq.heappush(heap, (lowest, *rank, own))
        return ranked

    def _fell(self, tenant: Tenant) -> None:
        self.on_fell(tenant.name)
        for flow in self._flows_of.get(tenant, ()):
            self._least.fell(flow)
