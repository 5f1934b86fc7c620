"""A snapshot of the tenants, of a bounded number of them."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.tenants import Tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantState:
    """One tenant, or all that are counted together as "other" (`tenant_totals.py`).

    `service` since the start is in predicted milliseconds, or in weighted tokens while step times
    are not known (`unit`); `share` is its part of all service. `lead` is the service by weight that
    it has had more than the tenant that is furthest behind; None for "other". Of its requests,
    `waiting` may be served now, and `running` hold `pages`, those of a shared prefix counted for
    each.
    """

    name: str
    weight: float
    unit: Literal["ms", "tokens"]
    service: float = 0.0
    share: float = 0.0
    lead: float | None = None
    waiting: int = 0
    running: int = 0
    pages: int = 0


def states_of(tenants: Tenants, running: RunningRequests) -> tuple[TenantState, ...]:
    """The tenants that are told apart, and "other" if there are more; the most served first. Looks
    at all running requests and backlogged tenants."""
    totals = tenants.totals
    num_waiting: Counter[str] = Counter()
    num_running: Counter[str] = Counter()
    num_pages: Counter[str] = Counter()
    for tenant in tenants.backlogged:
        num_waiting[totals.label_of(tenant.name)] += tenant.num_waiting
    for request in running:
        label = totals.label_of(request.tenant)
        num_running[label] += 1
        num_pages[label] += len(request.pages)
    in_all = sum(totals.service.values()) or 1.0
    least = min((one.virtual_time for one in tenants.backlogged), default=None)
    states = []
    for name in dict.fromkeys((*totals.service, *num_waiting, *num_running)):
        lead = None
        if totals.is_named(name):
            virtual_time = tenants.get(name).virtual_time
            lead = 0.0 if least is None else max(0.0, virtual_time - least)
        service = totals.service.get(name, 0.0)
        states.append(
            TenantState(
                name=name,
                weight=tenants.weight_of(name),
                unit=tenants.unit,
                service=service,
                share=service / in_all,
                lead=lead,
                waiting=num_waiting[name],
                running=num_running[name],
                pages=num_pages[name],
            )
        )
    return tuple(sorted(states, key=lambda one: -one.service))
