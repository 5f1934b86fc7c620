"""Sarathi-Serve's budget: one fixed number of tokens that decodes and prefill share.

The policy `sarathi` (OSDI'24, algorithm 3), chosen in `throttle/__init__.py`; the baseline that
token throttling is measured against. It never balances decodes over the steps.
"""

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.pipeline_load import PipelineLoad, TokenBudget


def fixed_budget(args: ThrottleArgs, load: PipelineLoad) -> TokenBudget:
    """Every ready decode, however many; prefill gets what they leave of `prefill_limit`."""
    left_tokens = max(0, args.prefill_limit - load.ready_decodes)
    return TokenBudget(left_tokens, load.ready_decodes, "MaxP")
