"""Explains one request's state: the rule that holds it, its numbers, and the request before it.

An explanation is rare and about one request, so it may look at the whole queue, which a decision
never does. It changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sgl_pipeline.pipeline_load import PipelineLoad, TokenBudget
from sgl_pipeline.requests import Request, RequestState
from sgl_pipeline.scheduling.outlook import Outlook, look_ahead
from sgl_pipeline.scheduling.waiting_reasons import BEHIND_FIRST, Reason, Rule, WaitingReasons
from sgl_pipeline.throttle import Policy


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
    """Explains the requests of the `StepScheduler` whose parts `reasons` has."""

    def __init__(self, reasons: WaitingReasons) -> None:
        self._reasons = reasons

    def explain(
        self,
        request: Request,
        budget: TokenBudget,
        *,
        is_paused: bool,
        ahead: Sequence[Request] | None = None,
    ) -> Explanation:
        """Explains why `request`, which waits or runs, waits under a step's `budget`.

        Args:
            ahead: as `WaitingReasons.reason` takes them.
        """
        reason = self._reason(request, budget, is_paused, ahead)
        text = reason.text
        if request.lease is not None:
            text += f"; its attention is computed by {request.lease.source}, which has its pages"
        return Explanation(
            request_id=request.request_id,
            state=_state(request),
            rule=reason.rule,
            text=text,
            behind=reason.behind,
            num_ahead=reason.num_ahead,
            num_retractions=request.num_retractions,
        )

    def explain_first(
        self, num_requests: int, budget: TokenBudget, *, is_paused: bool
    ) -> list[tuple[Request, Explanation]]:
        """The waiting requests that are served first, in order, each as `explain` does it. It looks
        at all that wait once, and not again for each."""
        explained: list[tuple[Request, Explanation]] = []
        ahead: list[Request] = []
        for request in self._reasons.waiting.first(num_requests):
            explanation = self.explain(request, budget, is_paused=is_paused, ahead=ahead)
            explained.append((request, explanation))
            if not self._reasons.is_passed_over(request):
                ahead.append(request)
        return explained

    def outlook(self, request: Request, load: PipelineLoad, policy: Policy) -> Outlook:
        """The requests served before `request`, when `policy` sees `load`."""
        parts = self._reasons
        return look_ahead(
            request,
            parts.waiting,
            parts.running,
            parts.pages,
            load,
            policy,
            parts.args.most_running_requests,
        )

    def _reason(
        self,
        request: Request,
        budget: TokenBudget,
        is_paused: bool,
        ahead: Sequence[Request] | None,
    ) -> Reason:
        if request.steps_in_flight:
            return Reason("in-flight", f"{request.steps_in_flight} steps of it are in the pipeline")
        if is_paused:
            return Reason("pause", "the scheduler is paused: no step starts")
        if request.state is RequestState.WAITING:
            return self._reasons.reason(request, budget, ahead)
        if request.is_prefilling:
            first = "older requests" if self._reasons.shares is None else BEHIND_FIRST
            text = (
                f"{request.remaining_prefill} prompt tokens are left, a step may prefill "
                f"{budget.prefill_text}, {first} first"
            )
            return Reason("budget", text)
        is_most = budget.decodes == self._reasons.args.max_decodes_per_step
        text = (
            f"{len(self._reasons.running.ready)} requests are ready to decode, a step takes "
            f"{budget.decodes}{' (--pp-max-micro-batch-size)' if is_most else ''}, the longest "
            "ready first"
        )
        return Reason("turn", text)


def _state(request: Request) -> Literal["waiting", "prefilling", "decoding"]:
    if request.state is RequestState.WAITING:
        return "waiting"
    return "prefilling" if request.num_computed < request.prefill_end else "decoding"
