"""Explains why requests have no drafts now. It follows the rules of `Drafts` in their order, and
changes nothing."""

from dataclasses import dataclass
from typing import Literal, get_args

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.pipeline_load import Bound, PipelineLoad
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.drafts import Drafts
from sgl_pipeline.throttle.draft_budget import ROWS_UNTIMED, least_chance
from sgl_pipeline.throttle.load_work import decode_work

RuleOfAll = Literal["idle", "waiting", "loading", "pause", "untimed", "time"]
RULES_OF_ALL: tuple[RuleOfAll, ...] = get_args(RuleOfAll)
# `drafted`: it has a draft.
RuleOfOne = Literal["prefill", "lease", "end", "acceptance", "pages", "lookup", "drafted"]


@dataclass(frozen=True, slots=True)
class DraftReason:
    """The rule by which there are no drafts, in a word and in a sentence without its full stop."""

    rule: RuleOfAll | RuleOfOne
    text: str


def why_none(load: PipelineLoad, bound_by: Bound) -> DraftReason | None:
    """The reason why no request can have a draft, when a step with this load was `bound_by`; None:
    some can."""
    if not load.running_decodes:
        return DraftReason("idle", "no request decodes")
    if load.waiting_tokens:
        text = f"{load.waiting_tokens} prompt tokens wait, and have the time that drafts would take"
        return DraftReason("waiting", text)
    if load.loading_tokens:
        return DraftReason("loading", "a prompt waits for its pages from a store or another server")
    if bound_by == "pause":
        return DraftReason("pause", "memory is short, and drafts take no pages then")
    work = decode_work(load)
    if _least_chance(load) <= 1.0:
        return None
    if load.step_times is None:
        return DraftReason(
            "untimed",
            f"what a step takes is not known yet: until then it has drafts only below "
            f"{ROWS_UNTIMED} decodes, and there are {work.decodes}",
        )
    text = f"in steps of {work.decodes} decodes a row more takes longer than a draft can gain"
    return DraftReason("time", text)


def explain_drafts(
    request: Request,
    drafts: Drafts,
    load: PipelineLoad,
    bound_by: Bound,
    chunk: Chunk | None,
    num_spare_pages: int,
) -> DraftReason | None:
    """The reason why `request`, which waits or runs, has no draft now, or `drafted`; None where the
    server has no drafts.

    Args:
        chunk: of the request, in the newest step that has one, if that is in flight.
        num_spare_pages: free pages beyond one for each running request.
    """
    if not drafts.most_each:
        return None
    if chunk is not None and chunk.draft_ids:
        text = f"its step checks {len(chunk.draft_ids)} draft tokens"
        return DraftReason("drafted", text)
    if request.num_computed < request.prefill_end:
        return DraftReason("prefill", "its prompt is computed first")
    if request.lease is not None:
        text = f"its attention is computed by {request.lease.source}, which keeps right rows only"
        return DraftReason("lease", text)
    if request.stops.max_new_tokens - len(request.output_ids) < 2:
        return DraftReason("end", "its next token is its last")
    return why_none(load, bound_by) or _of_its_own(request, drafts, load, num_spare_pages)


def _of_its_own(
    request: Request, drafts: Drafts, load: PipelineLoad, num_spare_pages: int
) -> DraftReason:
    chance, least = drafts.chance(request), _least_chance(load)
    if chance < least:
        text = (
            f"{chance:.0%} of its draft tokens are expected to be right, {least:.0%} would be "
            "worth their time; it gets another trial soon"
        )
        return DraftReason("acceptance", text)
    if num_spare_pages <= 0:
        return DraftReason("pages", "all free pages are kept for the running requests")
    text = "its newest tokens have not occurred before"
    if request.constraint is not None:
        text = "its grammar forces no text now, and allows no guess"
    return DraftReason("lookup", f"{text}, or likelier drafts of others had the rows")


def _least_chance(load: PipelineLoad) -> float:
    is_alone = load.running_decodes == 1
    return least_chance(load.step_times, decode_work(load), is_alone=is_alone)
