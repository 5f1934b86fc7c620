"""The bounds that all policies share, held for each entry of `POLICY_TABLE`."""

import math
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.pipeline_load import PipelineLoad, TokenBudget
from sgl_pipeline.step_work import StepWork
from sgl_pipeline.throttle import POLICY_TABLE, limit_decodes, make_policy

TOTAL_PAGES = 1000
# An example is one policy of eight.
with_each_policy = settings(max_examples=500)


@dataclass(frozen=True)
class LinearTimes:
    """Milliseconds of a step: a base, and a part for each row and each attended token."""

    base_ms: float
    row_ms: float
    attended_ms: float

    def step_ms(self, work: StepWork) -> float:
        attended = work.decode_attended_tokens + work.prefill_attended_tokens
        return self.base_ms + self.row_ms * work.tokens + self.attended_ms * attended


TIMES = st.builds(
    LinearTimes, base_ms=st.floats(0.1, 50), row_ms=st.floats(0, 1), attended_ms=st.floats(0, 1e-3)
)


MAYBE_TIMES = st.none() | TIMES
MOST_TOKENS = st.none() | st.integers(1, 10_000)
WEIGHTS = st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1e3)
TARGETS_MS = st.none() | st.floats(0.1, 1e5)
WAITING_TOKENS = st.sampled_from([0, 1, 10**7]) | st.integers(0, 5000)
DECODES = st.integers(0, 3) | st.integers(0, 600)
FREE_PAGES = st.sampled_from([0, 20, TOTAL_PAGES]) | st.integers(0, TOTAL_PAGES)


@st.composite
def throttles(draw: st.DrawFn, reading: str = "max_prefill_tokens") -> ThrottleArgs:
    """Any policy that reads this knob, with any of its arguments."""
    readers = [name for name, entry in POLICY_TABLE.items() if reading in entry.knobs]
    policy = draw(st.sampled_from(readers))
    has_targets = POLICY_TABLE[policy].has_targets
    most = draw(MOST_TOKENS)
    limit = most or POLICY_TABLE[policy].prefill_limit
    return ThrottleArgs(
        policy=policy,
        prefill_spread_steps=draw(st.integers(1, 20)),
        max_prefill_tokens=most,
        min_prefill_tokens=draw(st.integers(1, min(limit, 64))),
        pause_free_share=draw(st.sampled_from([0.0, 0.05, 0.5])),
        dynamic_chunking=draw(st.booleans()),
        ttft_weight=draw(WEIGHTS),
        target_tpot_ms=draw(TARGETS_MS) if has_targets else None,
        target_ttft_ms=draw(TARGETS_MS) if has_targets else None,
    )


@st.composite
def loads(draw: st.DrawFn, **fixed: Any) -> PipelineLoad:
    """Any load whose numbers go together, no free page and no waiting token among them."""
    waiting = draw(WAITING_TOKENS)
    ready, flying = draw(DECODES), draw(DECODES)
    context = draw(st.integers(1, 3000))
    step = StepWork(50, 10, 10 * context, 40 * context, 10)
    steps_in_flight = draw(st.integers(0, 9))
    values = {
        "step_id": draw(st.integers(0, 100)),
        "pipeline_depth": draw(st.integers(1, 9)),
        "waiting_tokens": waiting,
        "prompts": draw(st.integers(1, 3)) if waiting else 0,
        "running_decodes": ready + flying,
        "ready_decodes": ready,
        "free_pages": draw(FREE_PAGES),
        "reserved_pages": draw(st.integers(0, 3 * TOTAL_PAGES)),
        "total_pages": TOTAL_PAGES,
        "steps_in_flight": steps_in_flight,
        "waiting_attended_tokens": waiting * context,
        "decode_attended_tokens": (ready + flying) * context,
        "step_times": draw(MAYBE_TIMES),
        "work_in_flight": (step,) * steps_in_flight,
        "newest_wait_ms": draw(st.floats(0, 1e5)) if waiting else 0.0,
        "first_prompt_tokens": draw(st.integers(0, waiting)),
    }
    return PipelineLoad(**(values | fixed))


def prefill(budget: TokenBudget) -> tuple[int, float]:
    """What of it grows with the room for prompts."""
    return budget.prefill_tokens, math.inf if budget.time is None else budget.time.step_ms


@with_each_policy
@given(args=throttles(), load=loads(), most=st.none() | st.integers(1, 200))
def test_budgets_stay_within_the_limits_of_prefill_and_batch(
    args: ThrottleArgs, load: PipelineLoad, most: int | None
) -> None:
    policy = limit_decodes(make_policy(args), most)
    budget = policy(load)
    assert budget == policy(load)
    assert 0 <= budget.prefill_tokens <= args.prefill_limit
    assert 0 <= budget.decodes <= min(load.ready_decodes, most or load.ready_decodes)
    if budget.time is not None:
        assert 0.0 <= budget.time.step_ms < math.inf
        assert 0 <= budget.time.least_prefill_tokens <= args.prefill_limit


@with_each_policy
@given(args=throttles(), load=loads(), most=st.none() | st.integers(1, 200))
def test_decodes_are_never_starved(
    args: ThrottleArgs, load: PipelineLoad, most: int | None
) -> None:
    budget = limit_decodes(make_policy(args), most)(load)
    assert (budget.decodes > 0) == (load.ready_decodes > 0)
    if budget.time is not None and budget.time.decodes is not None and load.ready_decodes:
        assert budget.time.decodes.share_ms >= budget.time.decodes.row_ms > 0.0


@with_each_policy
@given(args=throttles(), load=loads(running_decodes=0, ready_decodes=0, steps_in_flight=0))
def test_an_idle_pipeline_may_always_prefill(args: ThrottleArgs, load: PipelineLoad) -> None:
    """However few pages are free: no other step would free one."""
    load = replace(load, decode_attended_tokens=0, work_in_flight=())
    budget = make_policy(args)(load)
    assert budget.prefill_tokens > 0
    assert budget.time is None or budget.time.step_ms > 0.0


@with_each_policy
@given(args=throttles(), load=loads())
def test_prefill_pauses_below_the_threshold_of_policies_that_read_it(
    args: ThrottleArgs, load: PipelineLoad
) -> None:
    budget = make_policy(args)(load)
    if budget.bound_by == "pause":
        assert load.is_moving
        assert budget.prefill_tokens == 0 and prefill(budget)[1] in (0.0, math.inf)
    if "pause_free_share" in POLICY_TABLE[args.policy].searched:
        is_low = load.free_share < args.pause_free_share
        assert (budget.bound_by == "pause") == (is_low and load.is_moving)


@with_each_policy
@given(args=throttles(reading="prefill_spread_steps"), load=loads(step_times=None))
def test_prefill_of_policies_that_spread_is_an_equal_share_of_the_waiting_tokens(
    args: ThrottleArgs, load: PipelineLoad
) -> None:
    """gLLM's eq. 3; `throttle-adaptive` does not spread a single prompt."""
    assume(load.prompts > 1)
    share = math.ceil(load.waiting_tokens / args.prefill_spread_steps)
    assert make_policy(args)(load).prefill_tokens <= max(share, args.min_prefill_tokens)


@with_each_policy
@given(args=throttles(), load=loads(), freed=st.integers(0, TOTAL_PAGES))
def test_more_free_pages_never_give_less_prefill(
    args: ThrottleArgs, load: PipelineLoad, freed: int
) -> None:
    """While something moves; otherwise a pause is lifted, which gives more than few free pages."""
    assume(load.is_moving)
    policy = make_policy(args)
    more = replace(load, free_pages=min(TOTAL_PAGES, load.free_pages + freed))
    # `dynamic_chunking` limits the time of a budget of tokens, and none of an empty one.
    assume(policy(load).prefill_tokens > 0 or not args.dynamic_chunking)
    assert all(a <= b for a, b in zip(prefill(policy(load)), prefill(policy(more)), strict=True))


@with_each_policy
@given(args=throttles(), load=loads(step_times=None), added=st.integers(0, 10**6))
def test_more_waiting_tokens_never_give_less_prefill(
    args: ThrottleArgs, load: PipelineLoad, added: int
) -> None:
    more = replace(load, waiting_tokens=load.waiting_tokens + added)
    policy = make_policy(args)
    assert policy(load).prefill_tokens <= policy(more).prefill_tokens


@with_each_policy
@given(args=throttles(), load=loads())
def test_only_entries_that_budget_time_read_the_times_of_steps(
    args: ThrottleArgs, load: PipelineLoad
) -> None:
    entry = POLICY_TABLE[args.policy]
    budget = entry.function(args, load)
    assert (budget.time is not None) == (entry.budgets_time and load.step_times is not None)
    if not entry.budgets_time:
        assert budget == entry.function(args, replace(load, step_times=None))
    if not entry.has_targets:
        assert budget.missed is None and budget.bound_by not in ("TPOT", "TTFT")


def test_targets_are_held_by_policies_that_budget_time_alone() -> None:
    entries = POLICY_TABLE.values()
    assert all(entry.budgets_time for entry in entries if entry.has_targets)
