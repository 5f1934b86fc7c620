"""Fair shares of prefill, places and pages among tenants: the parts that `--fair-shares-by` adds.

`tenants.py` counts, `fair_order.py` orders what waits, `fair_victims.py` takes back,
`short_steps.py` bounds how long a newcomer follows the steps on their way. Prefill of a
step goes chunk by chunk to the tenant with the least virtual time, whether the request runs or
waits. Decodes of all tenants take turns: their number is a matter of admission, and they count as
service.
"""

from collections.abc import Callable

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.fair_order import FairOrder
from sgl_pipeline.scheduling.fair_victims import FairVictims
from sgl_pipeline.scheduling.prefill_turns import PrefillTurns
from sgl_pipeline.scheduling.queue_order import FixedOrder, QueueOrder
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.short_steps import ShortSteps
from sgl_pipeline.scheduling.tenant_state import TenantState, states_of
from sgl_pipeline.scheduling.tenants import Tenants
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue
from sgl_pipeline.step_work import StepTimes
from sgl_pipeline.throttle import PipelineLoad, TokenBudget


class FairShares:
    """`order` is for the `WaitingQueue`; `share_out` must be called before anything else is asked.

    Args:
        own_order: makes the order of the requests of one tenant.
    """

    turns: PrefillTurns
    victims: FairVictims

    def __init__(
        self, args: SchedulingArgs, own_order: Callable[[], QueueOrder] = FixedOrder
    ) -> None:
        self.tenants = Tenants(args.weights_of_tenants)
        self.order = FairOrder(self.tenants, own_order)
        self._short_steps = ShortSteps(args.fair_step_cost)
        self._was_shared = False
        self._max_running_requests = args.max_running_requests

    @classmethod
    def of(
        cls, args: SchedulingArgs, own_order: Callable[[], QueueOrder] = FixedOrder
    ) -> "FairShares | None":
        """The shares of tenants; None if all requests are of one tenant."""
        return None if args.fair_shares_by is None else cls(args, own_order)

    def share_out(
        self, waiting: WaitingQueue, running: RunningRequests, pages: RequestPages
    ) -> FairVictims:
        """The tenants of `waiting` and `running` share places and `pages` from now on."""
        self._running = running
        self.turns = PrefillTurns(running, self.order.rank)
        self.order.on_fell = self.turns.fell
        self.victims = FairVictims(
            self.tenants, waiting, running, pages, self._max_running_requests
        )
        return self.victims

    def goes_first(self, head: Request, running: Request | None) -> bool:
        """True if `head`, the first that waits, comes before `running`, the first that runs. Of one
        tenant, prompts that run come first, as without shares."""
        if running is None:
            return True
        if head.tenant == running.tenant:
            return False
        return self.order.rank(head) < self.order.rank(running)

    def expect(self, request: Request, start: int) -> None:
        """The step that is being put together has a chunk of `request` from position `start`, if
        any has been scheduled."""
        if request.num_scheduled > start:
            self.tenants.expect(request.tenant, start, request.num_scheduled)

    def bounded(self, budget: TokenBudget, load: PipelineLoad) -> TokenBudget:
        """`budget` for steps that a newcomer can wait for."""
        is_shared = load.step_times is None and self._is_shared()
        return self._short_steps.bounded(budget, load, is_shared=is_shared)

    def charge(self, step: Microbatch, times: StepTimes | None) -> None:
        """`step` has been decided: counts its service and its length."""
        if times is None:
            self._was_shared = self._is_shared()
        self._short_steps.note(step.work, times)
        unit = self.tenants.unit
        self.tenants.charge(step.chunks, step.work, times)
        if self.tenants.unit != unit:
            self.turns.begin_anew()

    def _is_shared(self) -> bool:
        """True once requests of several tenants have been here at the same time."""
        if self._was_shared:
            return True
        names = {one.name for one in self.tenants.backlogged}
        return len(names.union(request.tenant for request in self._running)) > 1

    def lead(self, name: str, other: str) -> float:
        """The service by weight that tenant `name` has had more than `other`."""
        get = self.tenants.get
        return get(name).virtual_time - get(other).virtual_time

    def ahead_text(self, name: str, other: str) -> str:
        """Says that tenant `name` is ahead of its share beside `other`, which is not."""
        return (
            f"tenant {name!r} is ahead of its share: by weight it has had "
            f"{self.lead(name, other):.0f} {self.tenants.unit} more than {other!r}, which is next"
        )

    def behind_text(self, name: str) -> str | None:
        """Says that tenant `name` is behind its share; None if it is not. Looks at all running
        requests."""
        others = {one.tenant for one in self._running} - {name}
        most = max(others, key=lambda other: self.lead(other, name), default=None)
        if most is None or (lead := self.lead(most, name)) <= 0:
            return None
        return (
            f"tenant {name!r} is behind its share: by weight {most!r}, whose requests run, has had "
            f"{lead:.0f} {self.tenants.unit} more"
        )

    def states(self) -> tuple[TenantState, ...]:
        """The tenants as a snapshot shows them."""
        return states_of(self.tenants, self._running)
