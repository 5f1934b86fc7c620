"""What a policy sees and what it answers: both halves of the door between scheduling and throttle.

On the ground floor because each `Microbatch` carries the two that it was decided from; other rooms
take them from `throttle`. `StepScheduler` takes a `PipelineLoad` before each admission; a policy
turns it into a `TokenBudget` and must be a pure function of it (no clock, no memory, no
randomness).
"""

from dataclasses import dataclass
from typing import Literal

# The term of gLLM's eq. 3 that a prefill budget equals: #WP / #T, the share of free memory, #MinP,
# none because of the pause, or #MaxP, which is also the fixed budget of other policies.
Bound = Literal["WT", "UT", "MinP", "pause", "MaxP"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLoad:
    """A snapshot of the whole system, taken before admission.

    `waiting_tokens` are prompt tokens that must still be computed: radix hits and chunks in flight
    are not among them (gLLM #WP); `prompts` counts the requests they belong to. `running_decodes`
    counts decoding requests, in flight or not (gLLM #RD); `ready_decodes` those that are not in
    flight. `free_pages` are free or evictable; `reserved_pages` of them the running decodes are
    expected to need before they end. `args.Accounting` can switch single counts off.
    """

    step_id: int
    pipeline_depth: int
    waiting_tokens: int
    prompts: int
    running_decodes: int
    ready_decodes: int
    free_pages: int
    reserved_pages: int
    total_pages: int
    steps_in_flight: int

    @property
    def free_share(self) -> float:
        """gLLM KV_free, in [0, 1]."""
        return self.free_pages / self.total_pages

    @property
    def is_moving(self) -> bool:
        """Whether something runs without a new prefill, so that pages may come back."""
        return self.running_decodes > 0 or self.steps_in_flight > 0


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Upper bounds for one microbatch; less is used where pages or requests run out. `bound_by` is
    what made `prefill_tokens` what it is."""

    prefill_tokens: int
    decodes: int
    bound_by: Bound
