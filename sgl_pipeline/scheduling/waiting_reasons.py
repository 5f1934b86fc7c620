"""The reason for which one request waits in the queue, by the rules of `Admission.fill` in order.

For `explanation.py`. It may look at the whole queue, and changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.pipeline_load import TokenBudget
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.fair_shares import FairShares
from sgl_pipeline.scheduling.kv_tier import KvTier
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue

Rule = Literal[
    "in-flight",
    "pause",
    "loading",
    "shared-prefix",
    "order",
    "share",
    "running-limit",
    "state-slots",
    "pages",
    "held-pages",
    "budget",
    "turn",
]

# The requests that come first where tenants have shares.
BEHIND_FIRST = "tenants that are behind their share"


class Reason(NamedTuple):
    """As the fields of `Explanation` have it."""

    rule: Rule
    text: str
    behind: str | None = None
    num_ahead: int = 0


@dataclass(frozen=True, slots=True)
class WaitingReasons:
    """Finds the reasons in one `StepScheduler`, whose parts these are; `shares` is None where there
    is one tenant."""

    args: SchedulingArgs
    waiting: WaitingQueue
    running: RunningRequests
    pages: RequestPages
    tier: KvTier
    shares: FairShares | None

    def reason(
        self, request: Request, budget: TokenBudget, ahead: Sequence[Request] | None = None
    ) -> Reason:
        """The first rule that holds `request` under a step's `budget`.

        Args:
            ahead: the requests before it that are not passed over; None: they are looked up.
        """
        if (reason := self._prefix_on_its_way(request)) is not None:
            return reason
        if ahead is None:
            before = self.waiting.ahead_of(request)
            ahead = [one for one in before if not self.is_passed_over(one)]
        if ahead:
            return self._behind(request, ahead)
        # Where a step may prefill nothing, none is admitted, whatever it needs.
        reason = self._no_room(request) if budget.prefill_tokens > 0 else None
        return reason or Reason("budget", f"it is first in the queue; {self._budget_text(budget)}")

    def is_passed_over(self, request: Request) -> bool:
        """True if it waits for its prefix: it keeps its place in the order and holds no other
        back."""
        return self.waiting.is_held(request) or self.waiting.awaited_node(request) is not None

    def _prefix_on_its_way(self, request: Request) -> Reason | None:
        """The prefix of `request` is loaded, or another request computes it."""
        if (progress := self.tier.arrivals.progress(request)) is not None:
            return Reason("loading", progress)
        if self.waiting.is_held(request):
            return Reason("loading", "the store is asked how much of its prefix it has")
        if (load := self.tier.load_of(request)) is not None:
            text = (
                f"{load.num_tokens} tokens of its prefix are loaded from the store; all loads "
                f"under way are predicted to take {self.tier.loads.load_s(0):.2f} s"
            )
            return Reason("loading", text)
        awaited = self.waiting.awaited_node(request)
        if awaited is None:
            return None
        claimant = self.pages.prefilling(awaited)
        behind = None if claimant is None else claimant.request_id
        text = f"request {behind} is computing {awaited.end} tokens that this one needs too"
        return Reason("shared-prefix", text, behind)

    def _behind(self, request: Request, ahead: Sequence[Request]) -> Reason:
        """`request` waits for those before it in the queue, of which there is at least one."""
        come = "request comes" if len(ahead) == 1 else "requests come"
        texts = [f"{len(ahead)} waiting {come} first"]
        share_text = self._share_text(request, ahead)
        if share_text is not None:
            texts.append(share_text)
        last = ahead[-1]
        if why := self.waiting.why_before(last, request):
            texts.append(f"request {last.request_id} {why}")
        rule: Rule = "order" if share_text is None else "share"
        return Reason(rule, "; ".join(texts), last.request_id, len(ahead))

    def _share_text(self, request: Request, ahead: Sequence[Request]) -> str | None:
        """Names the first tenant that comes before that of `request`, at equal priority, because it
        has had less; None if there is none."""
        if (shares := self.shares) is None:
            return None
        for other in ahead:
            is_equal = other.priority == request.priority and other.tenant != request.tenant
            if is_equal and shares.lead(request.tenant, other.tenant) > 0:
                return shares.ahead_text(request.tenant, other.tenant)
        return None

    def _no_room(self, request: Request) -> Reason | None:
        """Other requests have what the first in the queue needs."""
        if len(self.running) >= self.args.max_running_requests:
            text = f"{len(self.running)} requests run, the limit is --max-running-requests"
            return self._taken(request, "running-limit", text)
        slots = self.pages.state_slots
        if slots.are_taken:
            text = (
                f"all {slots.num_slots} state slots (--max-mamba-cache-size) are taken, and each "
                "running request of this model needs one"
            )
            return self._taken(request, "state-slots", text)
        held = self.tier.held
        if held.is_full:
            text = (
                f"{held.num_pages} pages are held for transfer to other servers, no request is "
                f"admitted while more than {held.most_pages} are"
            )
            return Reason("held-pages", text)
        path, num_growing = self.waiting.path_of(request), self.running.num_growing
        if self.pages.fits(request, path, num_growing):
            return None
        text = (
            f"its prefill needs {self.pages.missing_pages(request, path)} pages; "
            f"{self.pages.num_available} are free or evictable, of which a page is kept for "
            f"each of {num_growing} running requests"
        )
        if held.num_pages:
            text += f"; {held.num_pages} are held for transfer to other servers"
        return self._taken(request, "pages", text)

    def _taken(self, request: Request, rule: Rule, text: str) -> Reason:
        """`text`, and that the tenant of `request` is behind its share, if it is."""
        behind = None if self.shares is None else self.shares.behind_text(request.tenant)
        return Reason(rule, text if behind is None else f"{text}; {behind}")

    def _budget_text(self, budget: TokenBudget) -> str:
        first = "running prefills" if self.shares is None else BEHIND_FIRST
        return f"a step may prefill {budget.prefill_text}, {first} first"
