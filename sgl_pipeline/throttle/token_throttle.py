"""Token throttling: prefill by what waits and what memory is left, decodes in equal shares.

The policy `throttle` (gLLM, SC'25, section 3), chosen in `throttle/__init__.py`. It never counts
radix hits or free pages itself: `PipelineLoad` brings them counted.
"""

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.throttle.decode_balance import balanced_decodes
from sgl_pipeline.throttle.load import PipelineLoad, TokenBudget


def token_throttle(args: ThrottleArgs, load: PipelineLoad) -> TokenBudget:
    """Prefill and decode budgets, independent of each other."""
    return TokenBudget(_prefill_tokens(args, load), balanced_decodes(load))


def _prefill_tokens(args: ThrottleArgs, load: PipelineLoad) -> int:
    """gLLM eq. 3: max(min(#WP / #T, #MaxP * (KV_free - thresh) / (1 - thresh)), #MinP).

    Below the threshold the paper's formula would still admit #MinP: there the pause wins, and it is
    lifted only while nothing decodes and nothing is in flight, since then no page would ever come
    back by itself.
    """
    spread = -(-load.waiting_tokens // args.prefill_spread_steps)
    if load.free_share >= args.pause_free_share:
        headroom = (load.free_share - args.pause_free_share) / (1.0 - args.pause_free_share)
        return max(min(spread, int(args.max_prefill_tokens * headroom)), args.min_prefill_tokens)
    if load.running_decodes or load.steps_in_flight:
        return 0
    return max(min(spread, args.max_prefill_tokens), args.min_prefill_tokens)
