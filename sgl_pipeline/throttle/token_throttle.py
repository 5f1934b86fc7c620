"""Token throttling: prefill by what waits and what memory is left, decodes in equal shares.

The policy `throttle` and its ablations (gLLM, SC'25, section 3 and figure 15). It never counts
radix hits or free pages itself: `PipelineLoad` has the counts.
"""

from sgl_pipeline.pipeline_load import Bound, PipelineLoad, TokenBudget
from sgl_pipeline.throttle.decode_balance import balanced_decodes
from sgl_pipeline.throttle.policy_args import PolicyArgs


def token_throttle(
    args: PolicyArgs,
    load: PipelineLoad,
    *,
    by_waiting: bool = True,
    by_memory: bool = True,
    by_threshold: bool = True,
) -> TokenBudget:
    """Prefill and decode budgets, independent of each other.

    Prefill is gLLM's eq. 3: max(min(#WP / #T, #MaxP * (KV_free - thresh) / (1 - thresh)), #MinP).
    Without `by_waiting` the first term is left out, without `by_memory` the second, and #MaxP takes
    its place (eq. 1). Without `by_threshold` thresh is 0.

    Below the threshold the formula would still admit #MinP: there the pause wins.
    """
    decodes = balanced_decodes(load)
    threshold = args.pause_free_share if by_threshold else 0.0
    is_paused = load.free_share < threshold
    # Lifted while nothing else moves, since then no page would ever come back by itself.
    if is_paused and load.is_moving:
        return TokenBudget(0, decodes, "pause")
    terms: dict[Bound, int] = {"MaxP": args.prefill_limit}
    if by_memory and not is_paused:
        headroom = (load.free_share - threshold) / (1.0 - threshold)
        terms["UT"] = int(args.prefill_limit * headroom)
    if by_waiting:
        terms["WT"] = spread_tokens(args, load)
    bound_by = min(terms, key=terms.__getitem__)
    if terms[bound_by] < args.min_prefill_tokens:
        return TokenBudget(args.min_prefill_tokens, decodes, "MinP")
    return TokenBudget(terms[bound_by], decodes, bound_by)


def spread_tokens(args: PolicyArgs, load: PipelineLoad) -> int:
    """#WP / #T, rounded up so that the last tokens do not wait for #MinP to fetch them."""
    return -(-load.waiting_tokens // args.prefill_spread_steps)
