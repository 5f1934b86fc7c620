"""Policies that bound the tokens of the next microbatch: pure functions of a `PipelineLoad`.

`StepScheduler` calls the policy that `make_policy` returns before each admission. A policy never
remembers, never draws a random number and never sees a request: equal loads give equal budgets, in
the runtime and in the simulator.
"""

from collections.abc import Callable
from functools import partial

from sgl_pipeline.pipeline_load import (
    Bound,
    DecodeShare,
    PipelineLoad,
    Target,
    TimeLimit,
    TokenBudget,
)
from sgl_pipeline.throttle.decode_balance import balanced_decodes
from sgl_pipeline.throttle.decode_limit import limit_decodes
from sgl_pipeline.throttle.equal_chunks import equal_chunks
from sgl_pipeline.throttle.policy_args import PolicyArgs
from sgl_pipeline.throttle.policy_table import POLICY_TABLE, PolicyEntry

__all__ = [
    "POLICY_TABLE",
    "Bound",
    "DecodeShare",
    "PipelineLoad",
    "Policy",
    "PolicyEntry",
    "Target",
    "TimeLimit",
    "TokenBudget",
    "balanced_decodes",
    "limit_decodes",
    "make_policy",
]

Policy = Callable[[PipelineLoad], TokenBudget]


def make_policy(args: PolicyArgs) -> Policy:
    """The policy that `args.policy` names, with the parameters of `args`."""
    policy = partial(POLICY_TABLE[args.policy].function, args)
    if not args.dynamic_chunking:
        return policy
    return lambda load: equal_chunks(policy(load), load, args.min_prefill_tokens)
