"""Token throttling that keeps room for the running decodes to grow, instead of a fixed share.

The policy `throttle-adaptive` (gLLM's code of 2026, `Scheduler.token_throttling`). `scheduling/`
computes and adapts the reserve; the load carries it as `reserved_pages`.
"""

from sgl_pipeline.pipeline_load import Bound, PipelineLoad, TokenBudget
from sgl_pipeline.throttle.decode_balance import balanced_decodes
from sgl_pipeline.throttle.policy_args import PolicyArgs
from sgl_pipeline.throttle.token_throttle import spread_tokens


def adaptive_throttle(args: PolicyArgs, load: PipelineLoad) -> TokenBudget:
    """As eq. 3 with the reserve for the threshold, except where gLLM's code differs.

    #MinP raises the share of the waiting tokens and never what memory allows, and a single prompt
    is not spread: alone it delays no other request.
    """
    decodes = balanced_decodes(load)
    headroom_pages = load.free_pages - load.reserved_pages
    if headroom_pages > 0:
        tokens = args.prefill_limit * headroom_pages // (load.total_pages - load.reserved_pages)
        tokens = max(tokens, 1)
    elif load.is_moving:
        return TokenBudget(0, decodes, "pause")
    else:
        tokens = args.prefill_limit
    bound_by: Bound = "UT" if tokens < args.prefill_limit else "MaxP"
    if load.prompts > 1:
        spread = spread_tokens(args, load)
        if max(spread, args.min_prefill_tokens) < tokens:
            tokens = max(spread, args.min_prefill_tokens)
            bound_by = "WT" if tokens == spread else "MinP"
    return TokenBudget(tokens, decodes, bound_by)
