"""Serves a server's last minutes again: its requests, on its stages as they were measured, under
other knobs.

Each cached prefix counts as the beginning of one prefix that all requests share and that is cached
when the first arrives: hits are as long as they were; what evicts them is not simulated. Answers
that have not ended get lengths like those that have. Drafts are right as often as they were, behind
runs of right ones as long; a request that had none is like all others together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.output_lengths import OutputLengths, even_share
from sgl_pipeline.pipeline.recent_load import PastRequest, RecentWork
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.calibration import FittedCosts, fit_records
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.virtual_drafts import acceptance_of
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import Segment, SimulatedRequest, TokenIds
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import make_policy

# The newest requests that are run again.
MAX_REQUESTS = 1000
# After the request that fills the cache, and before the others: it is over by then.
_WARM_UP_S = 1e4
# What the fitted times of steps may be multiplied by, and how closely that is found: near
# saturation, steps that are 3 % faster can make first tokens 10 % faster.
_SLOWDOWNS = (0.8, 4.0)
_SLOWDOWN_TOLERANCE = 1.01


@dataclass(frozen=True, slots=True)
class PastLoad:
    """One window of one server, ready to be run again any number of times."""

    work: RecentWork
    costs: FittedCosts
    requests: tuple[SimulatedRequest, ...]
    slowdown: float = 1.0

    @classmethod
    def of(cls, work: RecentWork) -> "PastLoad":
        """The window, made to take as long in all as it did: `slowdown` multiplies the fitted times
        of steps, because steps also wait for cores that others have, and near saturation a little
        of that makes long queues. Raises ConfigurationError where too few steps were measured."""
        costs = fit_records(work.steps, "the server's record", is_robust=True)
        load = cls(work, costs, tuple(past_requests(work.requests)))
        measured_ms = [one.total_ms for one in work.requests[-MAX_REQUESTS:]]
        low, high = _SLOWDOWNS
        while high / low > _SLOWDOWN_TOLERANCE:
            middle = (low * high) ** 0.5
            slowed = replace(load, costs=costs.slowed_by(middle), slowdown=middle)
            if slowed.excess_ms(measured_ms) > 0.0:
                high = middle
            else:
                low = middle
        return replace(load, costs=costs.slowed_by(low), slowdown=low)

    def excess_ms(self, measured_ms: Sequence[float | None]) -> float:
        """Total added latency of the requests under the knobs in force."""
        simulation = self.run(self.in_force)
        return sum(
            (served.finished_s - served.arrival_s) * 1e3 - total_ms
            for served, total_ms in zip(simulation.requests, measured_ms, strict=True)
            if total_ms is not None and served.finished_s is not None
        )

    @property
    def largest_step(self) -> int:
        """Tokens of the largest step that was measured."""
        return max(step.num_tokens for step in self.work.steps)

    @property
    def in_force(self) -> ThrottleArgs:
        """The policy's arguments while the window was served."""
        values = {name: one for name, one in self.work.knobs.items() if name != "accounting"}
        return ThrottleArgs(**values)  # type: ignore[arg-type]

    def run(
        self,
        throttle: ThrottleArgs,
        on_progress: Callable[[int, float], None] = lambda finished, now_s: None,
    ) -> Simulation:
        """Serves all requests; the one that fills the cache is not in the result."""
        accounting = self.work.knobs["accounting"]
        scheduling = SchedulingArgs(**(self.work.scheduling | {"accounting": accounting}))  # type: ignore[arg-type]
        scheduler = StepScheduler(
            scheduling,
            make_policy(throttle),
            num_pages=self.work.pool_tokens // scheduling.page_size,
            num_stages=self.costs.num_stages,
            context_length=self.work.pool_tokens,
        )
        simulation = VirtualPipeline(scheduler, self.costs, self._forecast()).run(
            self.requests, on_progress
        )
        served = tuple(one for one in simulation.requests if one.asked is not self.requests[0])
        return replace(simulation, requests=served)

    def _forecast(self) -> StepForecast:
        """The server's knowledge of its steps."""
        plan = StagePlan(0, self.costs.layer_counts)
        known = self.costs.known(step.work for step in self.work.steps)
        return StepForecast(plan, known, learns=False)


def past_requests(past: Sequence[PastRequest]) -> list[SimulatedRequest]:
    """A request that fills the cache, then those of the past, spaced as they came."""
    newest = past[-MAX_REQUESTS:]
    ids = TokenIds()
    shared = ids.fresh(max((one.cached_tokens for one in newest), default=0) + 1)
    lengths = OutputLengths(
        (one.output_tokens for one in newest if one.total_ms is not None),
        (one.output_tokens for one in newest if one.total_ms is None),
    )
    of_all = acceptance_of(one.drafts for one in newest if one.drafts is not None)
    longest = max((one.output_tokens for one in newest), default=1)
    requests = [SimulatedRequest(arrival_s=0.0, prompt=(shared,), output=ids.fresh(1))]
    for number, one in enumerate(newest):
        output_tokens = max(1, one.output_tokens)
        if one.total_ms is None:
            share = even_share(number)
            output_tokens = one.output_tokens + lengths.left(one.output_tokens, 2 * longest, share)
        cached = Segment(shared.first, one.cached_tokens)
        fresh = ids.fresh(max(1, one.prompt_tokens - one.cached_tokens))
        requests.append(
            SimulatedRequest(
                arrival_s=_WARM_UP_S + one.arrival_s - newest[0].arrival_s,
                prompt=(cached, fresh) if one.cached_tokens else (fresh,),
                output=ids.fresh(output_tokens),
                acceptance=of_all if one.drafts is None else acceptance_of([one.drafts], of_all),
            )
        )
    return requests
