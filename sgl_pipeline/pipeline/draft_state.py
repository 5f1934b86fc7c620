"""The state of drafts: of the server, for its snapshot, and of one request."""

from collections.abc import Iterable

import msgspec

from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.step_history import StepHistory
from sgl_pipeline.scheduling import Outlook, StepScheduler
from sgl_pipeline.scheduling.draft_reasons import DraftReason, explain_drafts, why_none


class DraftState(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts since the start: a request had one in a step `steps` times, in all `drafted_tokens`,
    of which `accepted_tokens` were right. A request has at most `most_each` of them in a step; 0:
    the server has no drafts. `rule` and `reason` say why no request can have one now; both are
    empty where some can."""

    most_each: int = 0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rule: str = ""
    reason: str = ""

    @property
    def accept_rate(self) -> float:
        """Share of the draft tokens that were right."""
        return self.accepted_tokens / max(1, self.drafted_tokens)

    @property
    def accept_length(self) -> float:
        """Mean number of tokens that a decode with a draft gave; 0.0: none had one."""
        return self.steps and 1.0 + self.accepted_tokens / self.steps


def draft_state(scheduler: StepScheduler, history: StepHistory) -> DraftState:
    """The state of the drafts of `scheduler`, whose steps are in `history`."""
    drafts = scheduler.drafts
    if not drafts.most_each:
        return DraftState()
    reason = why_none(scheduler.load(), history.newest_bound)
    return DraftState(
        most_each=drafts.most_each,
        steps=drafts.num_steps,
        drafted_tokens=drafts.num_drafted,
        accepted_tokens=drafts.num_accepted,
        rule=reason.rule if reason is not None else "",
        reason=reason.text if reason is not None else "",
    )


def draft_reason(
    scheduler: StepScheduler, open_steps: Iterable[OpenStep], outlook: Outlook
) -> DraftReason | None:
    """The reason why the request of `outlook` has a draft now, or none; None: the server has no
    drafts."""
    request, load = outlook.request, outlook.load
    chunks = [
        chunk for step in open_steps for chunk in step.microbatch.chunks if chunk.request is request
    ]
    return explain_drafts(
        request,
        scheduler.drafts,
        load,
        outlook.policy(load).bound_by,
        chunks[-1] if chunks else None,
        scheduler.num_free_pages - scheduler.num_running,
    )
