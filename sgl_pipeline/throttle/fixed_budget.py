"""Sarathi-Serve's budget: one fixed number of tokens that decodes and prefill share.

The policy `sarathi` (OSDI'24, algorithm 3), the baseline of token throttling. It never balances
decodes over the steps.
"""

from sgl_pipeline.pipeline_load import PipelineLoad, TokenBudget
from sgl_pipeline.throttle.policy_args import PolicyArgs


def fixed_budget(args: PolicyArgs, load: PipelineLoad) -> TokenBudget:
    """Every ready decode, however many; prefill gets what they leave of `prefill_limit`."""
    left_tokens = max(0, args.prefill_limit - load.ready_decodes)
    return TokenBudget(left_tokens, load.ready_decodes, "MaxP")
