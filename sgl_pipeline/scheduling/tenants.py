"""The virtual time of each tenant: the service that it has had, divided by its weight.

The waiting tenant with the least virtual time is served next. Virtual times are counted as in VTC
(Sheng et al., Fairness in Serving Large Language Models, OSDI 2024), and a tenant that comes back
is lifted as in WF2Q+ (Bennett and Zhang, 1996):

- A tenant is backlogged while a request of it waits and may be served. One that becomes backlogged
  is lifted to the entry level, so that of what it did not ask for it can save up a burst at most:
  a tenant that asks for less than its share then need not wait although its requests come unevenly.
- The entry level is a burst below the system's virtual time. That is at least the least virtual
  time of the backlogged tenants. It also rises with all service, at half the rate at which the
  backlogged tenants rise together: then any number of newcomers, each of which is first when it
  comes, cannot keep an older tenant from its turn.
- When no tenant is backlogged, each has had what it asked for, and nothing is owed: the entry level
  rises to the highest of them. With a burst below it, a tenant that begins to flood a server where
  another had all it wanted would be first for a second.

So of two tenants that are backlogged for a while, the service by weight differs by no more than a
burst and what the requests that one of them had running can still take. A tenant whose virtual time
is below the entry level is forgotten: it would be lifted to it anyway.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.scheduling.least_first import LeastFirst
from sgl_pipeline.scheduling.step_service import prefill_service, service_of
from sgl_pipeline.scheduling.tenant_totals import TenantTotals
from sgl_pipeline.step_work import StepTimes, StepWork

DEFAULT_WEIGHT = 1.0
# By weight; the second is in force while step times are not known.
BURST_MS = 1000.0
BURST_TOKENS = 2048.0


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant. `expected` is an estimate of what the step that is being put together adds to its
    virtual time. `num_waiting` requests wait and may be served. `last_served` is the number of the
    last step that had a chunk of it: of two with equal virtual times, it decides who is next, and
    where both had one in that step the name does."""

    name: str
    weight: float
    virtual_time: float
    expected: float = 0.0
    num_waiting: int = 0
    last_served: int = 0

    @property
    def level(self) -> float:
        """The tenant's virtual time, with what the step that is being put together adds."""
        return self.virtual_time + self.expected

    @property
    def rank(self) -> tuple[float, int, str]:
        """The lower, the sooner it is served. No two tenants have the same."""
        return self.level, self.last_served, self.name


class Tenants:
    """All tenants that are owed anything, or have had more than the others.

    `on_fell` is called with each tenant whose level may have fallen. Service is in predicted
    milliseconds where step times are known, and in weighted tokens until then.

    Args:
        weights: of the tenants by name; `DEFAULT_WEIGHT` for any other.
        burst_ms, burst_tokens: what a tenant can save up, in either unit.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        burst_ms: float = BURST_MS,
        burst_tokens: float = BURST_TOKENS,
    ) -> None:
        self.on_fell: Callable[[Tenant], None] = lambda tenant: None
        self.totals = TenantTotals(weights)
        self._weights = dict(weights)
        self._known: dict[str, Tenant] = {}
        self._backlogged: LeastFirst[Tenant] = LeastFirst(lambda one: (one.level,))
        self._others: LeastFirst[Tenant] = LeastFirst(_level_and_turn)
        self._backlogged_weight = 0.0
        self._burst_ms, self._burst_tokens = burst_ms, burst_tokens
        # At which one comes that had nothing: a burst below WF2Q+'s system virtual time.
        self._entry_level = -burst_tokens
        self._num_steps = 0
        self._expected: list[Tenant] = []
        self._times: StepTimes | None = None

    @property
    def unit(self) -> Literal["ms", "tokens"]:
        """The unit of service."""
        return "tokens" if self._times is None else "ms"

    @property
    def backlogged(self) -> Sequence[Tenant]:
        """The tenants of which a request waits and may be served."""
        return tuple(self._backlogged)

    @property
    def _burst(self) -> float:
        return self._burst_tokens if self._times is None else self._burst_ms

    def weight_of(self, name: str) -> float:
        return self._weights.get(name, DEFAULT_WEIGHT)

    def get(self, name: str) -> Tenant:
        """The tenant as it is now; one that is not remembered would enter at this level."""
        known = self._known.get(name)
        return known or Tenant(name, self.weight_of(name), self._entry_level)

    def has_saved(self, name: str) -> bool:
        """True if at least half of what the tenant may save up is left: it asks for less than its
        share, or has just come."""
        return self.get(name).level <= self._entry_level + 0.5 * self._burst

    def begins_to_wait(self, name: str) -> Tenant:
        """A request of the tenant waits from now on, and may be served."""
        tenant = self._known.get(name)
        if tenant is None or not tenant.num_waiting:
            self._raise_entry_level()
            # It may have been forgotten just now.
            tenant = self._remember(name)
            if tenant.virtual_time < self._entry_level:
                tenant.virtual_time = self._entry_level
            self._others.discard(tenant)
            self._backlogged.add(tenant)
            self._backlogged_weight += tenant.weight
        tenant.num_waiting += 1
        return tenant

    def ends_to_wait(self, tenant: Tenant) -> None:
        """A request of the tenant is admitted, or waits no more, or may not be served now."""
        tenant.num_waiting -= 1
        if not tenant.num_waiting:
            self._backlogged.discard(tenant)
            self._others.add(tenant)
            self._backlogged_weight -= tenant.weight
            if not self._backlogged:
                self._backlogged_weight = 0.0  # no rest of roundings

    def expect(self, name: str, start: int, end: int) -> None:
        """The step that is being put together has the prompt positions [start, end) of a request of
        the tenant."""
        tenant = self._remember(name)
        tenant.expected += prefill_service(start, end, self._times) / tenant.weight
        self._expected.append(tenant)

    def prompt_level(self, tenant: Tenant, num_tokens: int) -> float:
        """The expected rise of the tenant's level by a prompt of `num_tokens` tokens."""
        return prefill_service(0, num_tokens, self._times) / tenant.weight

    def charge(self, chunks: Sequence[Chunk], work: StepWork, times: StepTimes | None) -> None:
        """A step with `chunks` has been decided, of which `work` is the sum: counts its service, in
        place of what was expected."""
        self._use(times)
        self._num_steps += 1
        for tenant in self._expected:
            tenant.expected = 0.0
        services = service_of(chunks, work, times)
        for name, service in services.items():
            tenant = self._remember(name)
            tenant.virtual_time += service / tenant.weight
            tenant.last_served = self._num_steps
            self.totals.add(name, service)
        for tenant in self._expected:
            self._fell(tenant)
        self._expected.clear()
        if self._backlogged_weight:
            self._entry_level += 0.5 * sum(services.values()) / self._backlogged_weight

    def _use(self, times: StepTimes | None) -> None:
        """Counts by `times` from now on. In another unit all begin anew: what was owed in the old
        one is forgotten."""
        is_other_unit = (times is None) != (self._times is None)
        self._times = times
        if is_other_unit:
            self._entry_level = -self._burst
            self.totals.begin_anew()
            for tenant in tuple(self._known.values()):
                tenant.virtual_time = tenant.expected = 0.0
                self._fell(tenant)

    def _remember(self, name: str) -> Tenant:
        tenant = self._known.get(name)
        if tenant is None:
            self._known[name] = tenant = Tenant(name, self.weight_of(name), self._entry_level)
            self._others.add(tenant)
        return tenant

    def _fell(self, tenant: Tenant) -> None:
        self._backlogged.fell(tenant)
        self._others.fell(tenant)
        self.on_fell(tenant)

    def _raise_entry_level(self) -> None:
        least = self._backlogged.first()
        if least is not None:
            self._entry_level = max(self._entry_level, least.level - self._burst)
        elif self._known:
            self._entry_level = max(self._entry_level, *(one.level for one in self._known.values()))
        # One that was served and is at the entry level stays: who comes now is before it.
        entry = self._entry_level, 1
        while (tenant := self._others.first()) is not None and _level_and_turn(tenant) < entry:
            self._others.discard(tenant)
            del self._known[tenant.name]


def _level_and_turn(tenant: Tenant) -> tuple[float, int]:
    return tenant.level, tenant.last_served
