"""vLLM's queue: one token budget, spent in arrival order by whatever is ready.

The policy `greedy-queue` (vLLM V1 `Scheduler.schedule`). A request that decodes was admitted before
those that still prefill, so arrival order comes to decodes first. Unlike `fixed_budget` it never
lets the decodes themselves exceed the budget.
"""

from sgl_pipeline.pipeline_load import PipelineLoad, TokenBudget
from sgl_pipeline.throttle.policy_args import PolicyArgs


def greedy_queue(args: PolicyArgs, load: PipelineLoad) -> TokenBudget:
    """At most `prefill_limit` rows in all, decodes included."""
    decodes = min(load.ready_decodes, args.prefill_limit)
    return TokenBudget(args.prefill_limit - decodes, decodes, "MaxP")
