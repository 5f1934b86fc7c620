"""How many tokens the next microbatch may carry: pure functions of a `PipelineLoad`.

`StepScheduler` calls the policy that `make_policy` returns before each admission. A policy never
remembers, never draws a random number and never sees a request: equal loads give equal budgets, in
the runtime and in the simulator.
"""

from collections.abc import Callable, Mapping
from functools import partial

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.pipeline_load import (
    Bound,
    DecodeShare,
    PipelineLoad,
    Target,
    TimeLimit,
    TokenBudget,
)
from sgl_pipeline.throttle.adaptive_throttle import adaptive_throttle
from sgl_pipeline.throttle.decode_limit import limit_decodes
from sgl_pipeline.throttle.equal_chunks import equal_chunks
from sgl_pipeline.throttle.fixed_budget import fixed_budget
from sgl_pipeline.throttle.greedy_queue import greedy_queue
from sgl_pipeline.throttle.time_throttle import time_throttle
from sgl_pipeline.throttle.token_throttle import token_throttle

__all__ = [
    "Bound",
    "DecodeShare",
    "PipelineLoad",
    "Policy",
    "Target",
    "TimeLimit",
    "TokenBudget",
    "limit_decodes",
    "make_policy",
]

Policy = Callable[[PipelineLoad], TokenBudget]


# What each policy of `args.POLICIES` computes; test/throttle/test_policy_table.py holds the two to
# each other.
POLICY_TABLE: Mapping[str, Callable[[ThrottleArgs, PipelineLoad], TokenBudget]] = {
    "throttle": token_throttle,
    "throttle-time": time_throttle,
    "throttle-adaptive": adaptive_throttle,
    "no-wt": partial(token_throttle, by_waiting=False),
    "no-ut": partial(token_throttle, by_memory=False),
    "no-threshold": partial(token_throttle, by_threshold=False),
    "sarathi": fixed_budget,
    "greedy-queue": greedy_queue,
}


def make_policy(args: ThrottleArgs) -> Policy:
    """The policy that `args.policy` names, with the parameters of `args`."""
    policy = partial(POLICY_TABLE[args.policy], args)
    if not args.dynamic_chunking:
        return policy
    return lambda load: equal_chunks(policy(load), load, args.min_prefill_tokens)
