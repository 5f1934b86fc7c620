"""Every policy, with all that other rooms need to know of it.

Command line, live knobs, page, metrics and simulator take policies from this table: a new policy is
its function and one entry.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from sgl_pipeline.pipeline_load import PipelineLoad, TokenBudget
from sgl_pipeline.throttle.adaptive_throttle import adaptive_throttle
from sgl_pipeline.throttle.fixed_budget import fixed_budget
from sgl_pipeline.throttle.greedy_queue import greedy_queue
from sgl_pipeline.throttle.policy_args import PolicyArgs
from sgl_pipeline.throttle.time_throttle import time_throttle
from sgl_pipeline.throttle.token_throttle import token_throttle

# Knobs that have an effect under every policy. `min_prefill_tokens` also bounds the chunks of
# `dynamic_chunking`.
SHARED_KNOBS = (
    *("policy", "max_prefill_tokens", "min_prefill_tokens"),
    *("accounting", "dynamic_chunking"),
)
TARGETS = ("target_tpot_ms", "target_ttft_ms")

Searched = dict[str, tuple[float, ...]]
_SPREADS: Searched = {"prefill_spread_steps": (1, 2, 4, 8, 16)}
_WEIGHTS: Searched = {"ttft_weight": (0.25, 1.0, 4.0, 16.0)}
_LIMITS: Searched = {"max_prefill_tokens": (512, 1024, 2048, 4096)}
_ADAPTIVE_LIMITS: Searched = {"max_prefill_tokens": (2048, 4096, 8192, 16384)}
_PAUSES: Searched = {"pause_free_share": (0.0, 0.05, 0.1)}
_BUDGETS: Searched = {"max_prefill_tokens": (256, 512, 1024, 2048, 4096)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """One policy.

    Args:
        function: pure.
        searched: the knobs that the policy reads, `min_prefill_tokens` aside, in the order in which
            the simulator searches them, each with the values that its budget search tries.
        prefill_limit: the most prefill tokens of a step, as the policy's authors set it.
        budgets_time: whether it reads `PipelineLoad.step_times`.
        has_targets: whether it holds the `TARGETS`; others refuse them.
    """

    function: Callable[[PolicyArgs, PipelineLoad], TokenBudget]
    searched: Mapping[str, tuple[float, ...]]
    prefill_limit: int = 2048
    budgets_time: bool = False
    has_targets: bool = False

    @property
    def knobs(self) -> tuple[str, ...]:
        """All knobs that have an effect under the policy."""
        targets = TARGETS if self.has_targets else ()
        return tuple(dict.fromkeys((*SHARED_KNOBS, *self.searched, *targets)))


POLICY_TABLE: Mapping[str, PolicyEntry] = {
    "throttle": PolicyEntry(function=token_throttle, searched=_SPREADS | _LIMITS | _PAUSES),
    "throttle-time": PolicyEntry(
        function=time_throttle,
        searched=_SPREADS | _WEIGHTS | _LIMITS | _PAUSES,
        budgets_time=True,
        has_targets=True,
    ),
    "throttle-adaptive": PolicyEntry(
        function=adaptive_throttle, searched=_SPREADS | _ADAPTIVE_LIMITS, prefill_limit=8192
    ),
    "no-wt": PolicyEntry(
        function=partial(token_throttle, by_waiting=False), searched=_LIMITS | _PAUSES
    ),
    "no-ut": PolicyEntry(
        function=partial(token_throttle, by_memory=False), searched=_SPREADS | _LIMITS | _PAUSES
    ),
    "no-threshold": PolicyEntry(
        function=partial(token_throttle, by_threshold=False), searched=_SPREADS | _LIMITS
    ),
    "sarathi": PolicyEntry(function=fixed_budget, searched=_BUDGETS),
    "greedy-queue": PolicyEntry(function=greedy_queue, searched=_BUDGETS),
}
