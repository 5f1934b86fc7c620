"""How many tokens the next microbatch may carry: pure functions of a `PipelineLoad`.

`StepScheduler` calls the policy that `make_policy` returns before each admission. A policy never
remembers, never draws a random number and never sees a request: equal loads give equal budgets, in
the runtime and in the simulator.
"""

from collections.abc import Callable
from functools import partial

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.throttle.fixed_budget import fixed_budget
from sgl_pipeline.throttle.greedy_queue import greedy_queue
from sgl_pipeline.throttle.load import PipelineLoad, TokenBudget
from sgl_pipeline.throttle.token_throttle import token_throttle

__all__ = ["PipelineLoad", "Policy", "TokenBudget", "make_policy"]

Policy = Callable[[PipelineLoad], TokenBudget]


def make_policy(args: ThrottleArgs) -> Policy:
    """The policy that `args.policy` names, with the parameters of `args`."""
    policies = {
        "throttle": token_throttle,
        "sarathi": fixed_budget,
        "greedy-queue": greedy_queue,
    }
    return partial(policies[args.policy], args)
