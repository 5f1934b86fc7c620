"""A policy's input and output: the interface between scheduling and throttle.

On the ground floor because each `Microbatch` carries the two that it was decided from; other rooms
take them from `throttle`. `StepScheduler` takes a `PipelineLoad` before each admission; a policy
turns it into a `TokenBudget` and must be a pure function of it (no clock, no memory, no
randomness).
"""

from dataclasses import dataclass
from typing import Literal

from sgl_pipeline.step_work import StepTimes, StepWork

# The term of gLLM's eq. 3 that a prefill budget equals: #WP / #T, the share of free memory, #MinP,
# none because of the pause, or #MaxP, which is also the fixed budget of other policies. Or a target
# that the server was given: for the time between tokens, or to the first one. Or the length of
# steps where tenants share the server, if that is shorter than all of these.
Bound = Literal["WT", "UT", "MinP", "pause", "MaxP", "TPOT", "TTFT", "fair-step"]
Target = Literal["TPOT", "TTFT"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLoad:
    """A snapshot of the whole system, taken before admission.

    `waiting_tokens` are prompt tokens that must still be computed, without radix hits and chunks in
    flight (gLLM #WP); `prompts` counts the requests they belong to. `loading_tokens` come from a
    store meanwhile: they are neither cached nor to be computed. `running_decodes` counts
    decoding requests, in flight or not (gLLM #RD); `ready_decodes` the decodes that are not in
    flight. `free_pages` are free or evictable; the running decodes are expected to need
    `reserved_pages` of them before they end. `args.Accounting` can switch single counts off.

    For policies that budget time: `waiting_attended_tokens` are the pairs of a row and a token that
    it attends to, of the waiting tokens; `decode_attended_tokens` the pairs of one more token of
    each running decode; `step_times` predicts step times, None while they are not known;
    `work_in_flight` is the work of the steps in flight. `newest_wait_ms` is the age of the newest
    request whose prompt is not computed. `first_prompt_tokens` are the waiting tokens of the first
    prompt in `Request.order` of those that are begun; 0 if none is.
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
    loading_tokens: int = 0
    waiting_attended_tokens: int = 0
    decode_attended_tokens: int = 0
    step_times: StepTimes | None = None
    work_in_flight: tuple[StepWork, ...] = ()
    newest_wait_ms: float = 0.0
    first_prompt_tokens: int = 0

    @property
    def free_share(self) -> float:
        """gLLM KV_free, in [0, 1]."""
        return self.free_pages / self.total_pages

    @property
    def in_flight_ms(self) -> float:
        """Time of the longest step in flight, 0 while it is not known. Predicted on demand, so that
        other policies pay nothing."""
        if self.step_times is None:
            return 0.0
        return max(map(self.step_times.step_ms, self.work_in_flight), default=0.0)

    @property
    def is_moving(self) -> bool:
        """True if something runs without a new prefill, so that pages may come back."""
        return self.running_decodes > 0 or self.steps_in_flight > 0


@dataclass(frozen=True, slots=True)
class DecodeShare:
    """Decodes by what they take: `row_ms` each and `attended_ms` for each token that it attends
    to, `share_ms` in all. The fixed part of a step is divided among their `row_ms`."""

    share_ms: float
    row_ms: float
    attended_ms: float


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The time limit of a step, by `times`: prefill fills the rest of `step_ms` after its decodes,
    and gets `least_prefill_tokens` of one prompt in any case. `decodes` None: by count alone. The
    prompt of a tenant that asks for less than its share may stretch the step to `newcomer_ms` if it
    ends there."""

    step_ms: float
    least_prefill_tokens: int
    times: StepTimes
    decodes: DecodeShare | None = None
    newcomer_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Upper bounds for one microbatch; less is used where pages or requests run out. `bound_by` is
    the term that decided the prefill budget: of `prefill_tokens`, or of `time` if there is a limit.
    `missed` is the target that cannot be met now."""

    prefill_tokens: int
    decodes: int
    bound_by: Bound
    time: TimeLimit | None = None
    missed: Target | None = None

    @property
    def prefill_text(self) -> str:
        """The prefill budget of a step, in words."""
        if self.time is None:
            return f"{self.prefill_tokens} prompt tokens (bound by {self.bound_by})"
        return f"what its decodes leave of {self.time.step_ms:.1f} ms (bound by {self.bound_by})"
