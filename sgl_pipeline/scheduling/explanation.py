"""Explains one request's state: the rule that holds it, its numbers, and the request before it.

An explanation is rare and about one request, so it may look at the whole queue, which a decision
never does. It follows the rules of `Admission.fill` in their order, and changes nothing.
"""

from dataclasses import dataclass
from typing import Literal

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.pipeline_load import PipelineLoad, TokenBudget
from sgl_pipeline.requests import Request, RequestState
from sgl_pipeline.scheduling.fair_shares import FairShares
from sgl_pipeline.scheduling.kv_tier import KvTier
from sgl_pipeline.scheduling.outlook import Outlook, look_ahead
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue
from sgl_pipeline.throttle import Policy

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The condition that one request waits for.

    `rule` is what holds it: its step is in the pipeline (`in-flight`), the scheduler is paused
    (`pause`), its prefix is looked up in the store or loaded from there, or computed by another
    server and loaded from that one (`loading`), another request prefills its prefix
    (`shared-prefix`), others come first (`order`), others come first and one of them is of a tenant
    that has had less (`share`), the maximum number of requests runs (`running-limit`), requests own
    all state slots (`state-slots`), its prefill does not fit (`pages`), other servers have to read
    what was computed for them (`held-pages`), the prefill budget is used up (`budget`), other
    decodes have been ready for longer (`turn`).

    `behind` is the request that it waits for: the next before it in the queue, or the one that
    prefills its prefix. `num_ahead` counts the requests before it in the queue. `text` is the
    explanation in words.
    """

    request_id: str
    state: Literal["waiting", "prefilling", "decoding"]
    rule: Rule
    text: str
    behind: str | None = None
    num_ahead: int = 0
    num_retractions: int = 0


class RequestExplainer:
    """Explains the requests of one `StepScheduler`, whose parts these are."""

    def __init__(
        self,
        args: SchedulingArgs,
        waiting: WaitingQueue,
        running: RunningRequests,
        pages: RequestPages,
        tier: KvTier,
        shares: FairShares | None = None,
    ) -> None:
        self._shares = shares
        self._tier = tier
        self._args = args
        self._waiting = waiting
        self._running = running
        self._pages = pages

    def explain(self, request: Request, budget: TokenBudget, *, is_paused: bool) -> Explanation:
        """Explains why `request`, which waits or runs, waits under a step's `budget`."""
        if request.steps_in_flight:
            text = f"{request.steps_in_flight} steps of it are in the pipeline"
            return _explanation(request, "in-flight", text)
        if is_paused:
            return _explanation(request, "pause", "the scheduler is paused: no step starts")
        if request.state is RequestState.WAITING:
            return self._waiting_for(request, budget)
        if request.is_prefilling:
            text = (
                f"{request.remaining_prefill} prompt tokens are left, a step may prefill "
                f"{budget.prefill_text}, {self._prefill_order} first"
            )
            return _explanation(request, "budget", text)
        is_most = budget.decodes == self._args.max_decodes_per_step
        text = (
            f"{len(self._running.ready)} requests are ready to decode, a step takes "
            f"{budget.decodes}{' (--pp-max-micro-batch-size)' if is_most else ''}, the longest "
            "ready first"
        )
        return _explanation(request, "turn", text)

    def outlook(self, request: Request, load: PipelineLoad, policy: Policy) -> Outlook:
        """The requests served before `request`, when `policy` sees `load`."""
        return look_ahead(
            request,
            self._waiting,
            self._running,
            self._pages,
            load,
            policy,
            self._args.most_running_requests,
        )

    def _waiting_for(self, request: Request, budget: TokenBudget) -> Explanation:
        if (progress := self._tier.arrivals.progress(request)) is not None:
            return _explanation(request, "loading", progress)
        if self._waiting.is_held(request):
            text = "the store is asked how much of its prefix it has"
            return _explanation(request, "loading", text)
        if (load := self._tier.load_of(request)) is not None:
            left_s = self._tier.loads.load_s(0)
            text = (
                f"{load.num_tokens} tokens of its prefix are loaded from the store; all loads "
                f"under way are predicted to take {left_s:.2f} s"
            )
            return _explanation(request, "loading", text)
        awaited = self._waiting.awaited_node(request)
        if awaited is not None:
            claimant = self._pages.prefilling(awaited)
            behind = None if claimant is None else claimant.request_id
            text = f"request {behind} is computing {awaited.end} tokens that this one needs too"
            return _explanation(request, "shared-prefix", text, behind)
        ahead = [
            other for other in self._waiting.ahead_of(request) if not self._is_passed_over(other)
        ]
        if ahead:
            return self._behind(request, ahead)
        return self._first_in_queue(request, budget)

    @property
    def _prefill_order(self) -> str:
        """The prompts that go on before others, in words."""
        return "older requests" if self._shares is None else "tenants that are behind their share"

    def _behind(self, request: Request, ahead: list[Request]) -> Explanation:
        """`request` waits for those before it in the queue, of which there is at least one."""
        come = "request comes" if len(ahead) == 1 else "requests come"
        text = f"{len(ahead)} waiting {come} first"
        rule: Rule = "order"
        if self._shares is not None:
            first = next((one for one in ahead if self._has_had_less(one, request)), None)
            if first is not None:
                rule = "share"
                text += f"; {self._shares.ahead_text(request.tenant, first.tenant)}"
        last = ahead[-1]
        if why := self._waiting.why_before(last, request):
            text += f"; request {last.request_id} {why}"
        return _explanation(request, rule, text, last.request_id, len(ahead))

    def _has_had_less(self, other: Request, request: Request) -> bool:
        """True if the tenant of `other` comes before that of `request`, at equal priority."""
        assert self._shares is not None
        return (
            other.priority == request.priority
            and other.tenant != request.tenant
            and self._shares.lead(request.tenant, other.tenant) > 0
        )

    def _is_passed_over(self, request: Request) -> bool:
        """True if it waits for its prefix: it keeps its place in the order and holds no other
        back."""
        return self._waiting.is_held(request) or self._waiting.awaited_node(request) is not None

    def _first_in_queue(self, request: Request, budget: TokenBudget) -> Explanation:
        num_running, num_growing = len(self._running), self._running.num_growing
        path = self._waiting.path_of(request)
        if budget.prefill_tokens > 0 and num_running >= self._args.max_running_requests:
            text = f"{num_running} requests run, the limit is --max-running-requests"
            text += self._behind_share(request)
            return _explanation(request, "running-limit", text)
        slots = self._pages.state_slots
        if budget.prefill_tokens > 0 and slots.are_taken:
            text = (
                f"all {slots.num_slots} state slots (--max-mamba-cache-size) are taken, and each "
                "running request of this model needs one"
            )
            text += self._behind_share(request)
            return _explanation(request, "state-slots", text)
        held = self._tier.held
        if budget.prefill_tokens > 0 and held.is_full:
            text = (
                f"{held.num_pages} pages are held for transfer to other servers, no request is "
                f"admitted while more than {held.most_pages} are"
            )
            return _explanation(request, "held-pages", text)
        if budget.prefill_tokens > 0 and not self._pages.fits(request, path, num_growing):
            text = (
                f"its prefill needs {self._pages.missing_pages(request, path)} pages; "
                f"{self._pages.num_available} are free or evictable, of which a page is kept for "
                f"each of {num_growing} running requests"
            )
            if held.num_pages:
                text += f"; {held.num_pages} are held for transfer to other servers"
            text += self._behind_share(request)
            return _explanation(request, "pages", text)
        text = (
            f"it is first in the queue; a step may prefill {budget.prefill_text}, "
            f"{'running prefills' if self._shares is None else self._prefill_order} first"
        )
        return _explanation(request, "budget", text)

    def _behind_share(self, request: Request) -> str:
        """Says that the tenant of `request` is behind its share, if it is."""
        text = None if self._shares is None else self._shares.behind_text(request.tenant)
        return "" if text is None else f"; {text}"

    def explain_first(
        self, num_requests: int, budget: TokenBudget, *, is_paused: bool
    ) -> list[tuple[Request, Explanation]]:
        """The waiting requests that are served first, in order, each as `explain` does it. It looks
        at all that wait once, and not again for each."""
        explained: list[tuple[Request, Explanation]] = []
        before: list[Request] = []
        for request in self._waiting.first(num_requests):
            if self._is_passed_over(request):
                explanation = self.explain(request, budget, is_paused=is_paused)
            else:
                if before and not is_paused and not request.steps_in_flight:
                    explanation = self._behind(request, before)
                else:
                    explanation = self.explain(request, budget, is_paused=is_paused)
                before.append(request)
            explained.append((request, explanation))
        return explained


def _explanation(
    request: Request, rule: Rule, text: str, behind: str | None = None, num_ahead: int = 0
) -> Explanation:
    state: Literal["waiting", "prefilling", "decoding"] = "decoding"
    if request.state is RequestState.WAITING:
        state = "waiting"
    elif request.num_computed < request.prefill_end:
        state = "prefilling"
    if request.lease is not None:
        text += f"; its attention is computed by {request.lease.source}, which has its pages"
    return Explanation(
        request_id=request.request_id,
        state=state,
        rule=rule,
        text=text,
        behind=behind,
        num_ahead=num_ahead,
        num_retractions=request.num_retractions,
    )
