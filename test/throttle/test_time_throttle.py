"""The throttle by time on worked examples, and its sharing out of decodes."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pipeline_load import PipelineLoad, TokenBudget
from sgl_pipeline.step_work import StepWork
from sgl_pipeline.throttle import make_policy
from sgl_pipeline.throttle.load_work import decode_work, ready_work

ARGS = ThrottleArgs(policy="throttle-time")


@dataclass(frozen=True)
class Times:
    """A step takes `base_ms`, and so much for each row, sample and thousand of attended tokens."""

    base_ms: float = 10.0
    row_ms: float = 0.1
    sample_ms: float = 0.0
    attended_ms: float = 0.0

    def step_ms(self, work: StepWork) -> float:
        attended = work.decode_attended_tokens + work.prefill_attended_tokens
        rows_ms = self.row_ms * work.tokens + self.sample_ms * work.samples
        return self.base_ms + rows_ms + self.attended_ms * attended / 1000


def rows(tokens: int) -> StepWork:
    return StepWork(tokens, 0, 0, 0, 0)


def load(times: Times | None = Times(), **changes: Any) -> PipelineLoad:
    """An idle pipeline of two stages, all of whose 1000 pages are free, with `changes`."""
    values = {
        "step_id": 0,
        "pipeline_depth": 2,
        "waiting_tokens": 0,
        "prompts": 1,
        "running_decodes": 0,
        "ready_decodes": 0,
        "free_pages": 1000,
        "reserved_pages": 4,
        "total_pages": 1000,
        "steps_in_flight": 0,
    }
    # A decode attends to its own token at least.
    values["decode_attended_tokens"] = changes.get("running_decodes", 0)
    return PipelineLoad(**(values | changes), step_times=times)  # type: ignore[arg-type]


def budget(args: ThrottleArgs = ARGS, times: Times | None = Times(), **changes: Any) -> TokenBudget:
    return make_policy(args)(load(times, **changes))


def step_ms(args: ThrottleArgs = ARGS, times: Times = Times(), **changes: Any) -> float:
    limit = budget(args, times, **changes).time
    assert limit is not None
    return limit.step_ms


def test_while_nobody_knows_what_steps_take_it_throttles_tokens() -> None:
    for changes in ({"waiting_tokens": 8000}, {"running_decodes": 9, "ready_decodes": 5}):
        by_tokens = make_policy(ThrottleArgs(policy="throttle"))(load(None, **changes))
        assert budget(times=None, **changes) == by_tokens


def test_a_step_may_take_what_its_share_of_all_work_takes() -> None:
    """Half of the decodes, a twelfth of the prompts: 10 + 50 x 0.1 + 667 x 0.1."""
    found = budget(waiting_tokens=8000, running_decodes=100, ready_decodes=50)
    assert found.time is not None
    assert found.time.step_ms == pytest.approx(10 + 5 + 66.7)
    assert (found.bound_by, found.prefill_tokens, found.decodes) == ("WT", 2048, 50)


def test_decodes_may_attend_to_nothing_here() -> None:
    """Those of leases, whose attention another server computes."""
    found = budget(running_decodes=3, ready_decodes=3, decode_attended_tokens=0)
    assert found.time is not None and found.time.decodes is not None
    assert found.time.decodes.attended_ms == 0.0


def test_what_is_attended_to_counts() -> None:
    """Decodes of context 400 and a twelfth of a prompt whose first part is cached."""
    times = Times(attended_ms=1.0)
    found = step_ms(
        times=times,
        waiting_tokens=800,
        waiting_attended_tokens=80_000,
        running_decodes=20,
        decode_attended_tokens=8000,
    )
    assert found == pytest.approx(10 + 1 + 4 + 6.7 + 6.667)


def test_samples_of_prompts_count_in_the_step_that_ends_them() -> None:
    times, at_once = Times(row_ms=0.01, sample_ms=2.0), replace(ARGS, prefill_spread_steps=1)
    found = step_ms(at_once, times, waiting_tokens=800, prompts=16)
    assert found == pytest.approx(10 + 8 + 16 * 2)


def test_free_memory_bounds_it_as_a_share_of_the_largest_step() -> None:
    """(0.525 - 0.05) / 0.95 is a half: 1024 tokens of the largest 2048."""
    found = budget(waiting_tokens=10**6, free_pages=525)
    assert found.time is not None and found.bound_by == "UT"
    assert found.time.step_ms == pytest.approx(10 + 102.4)


def test_no_step_takes_longer_than_the_largest() -> None:
    found = budget(waiting_tokens=10**6)
    assert found.time is not None and found.bound_by in ("MaxP", "UT")
    assert found.time.step_ms == pytest.approx(10 + 204.8)


def test_the_largest_step_holds_as_many_tokens_of_long_prompts_as_of_short_ones() -> None:
    """In the mean: 2048 tokens with 3000 before them, not the first 2048 of a prompt. With fewer,
    long prompts would go through more steps than by tokens, and read the weights as often."""
    waiting = {"waiting_tokens": 10**5, "waiting_attended_tokens": 3000 * 10**5}
    found = step_ms(times=Times(attended_ms=0.01), **waiting)
    assert found == pytest.approx(10 + 204.8 + 0.01 * 2048 * 3)
    found = step_ms(times=Times(attended_ms=0.01), **waiting, free_pages=525)
    assert found == pytest.approx(10 + (204.8 + 0.01 * 2048 * 3) / 2)


def test_a_step_may_have_the_least_prefill_or_a_twentieth_more_than_its_decodes() -> None:
    few = budget(waiting_tokens=8)
    assert few.time is not None
    assert (few.time.step_ms, few.bound_by) == (pytest.approx(10 + 3.2), "MinP")
    assert few.time.least_prefill_tokens == 32
    many = step_ms(waiting_tokens=8, running_decodes=2000, ready_decodes=2000)
    assert many == pytest.approx(1.05 * (10 + 100))


def test_a_step_without_its_decodes_is_not_filled_until_it_takes_as_long_as_with_them() -> None:
    """A share of 50 decodes takes 51 ms, 83 with 32 tokens beside it. The step that lacks them gets
    what the waiting work wants, not 83 ms of prefill."""
    times = Times(base_ms=1.0, row_ms=1.0)
    waiting = {"times": times, "waiting_tokens": 36, "running_decodes": 400, "pipeline_depth": 8}
    beside, without = budget(**waiting, ready_decodes=50), budget(**waiting, ready_decodes=0)
    assert (beside.bound_by, without.bound_by) == ("MinP", "WT")
    assert beside.time is not None and beside.time.step_ms == pytest.approx(1 + 50 + 32)
    assert without.time is not None and without.time.step_ms == pytest.approx(1 + 50 + 36 / 12)
    few = budget(**(waiting | {"running_decodes": 8}), ready_decodes=0)
    assert few.bound_by == "MinP"
    assert few.time is not None and few.time.step_ms == pytest.approx(1 + 32)


def test_ready_decodes_are_of_mean_length_and_no_more_than_a_share() -> None:
    state = load(running_decodes=8, decode_attended_tokens=800, ready_decodes=1)
    assert decode_work(state) == StepWork(4, 4, 400, 0, 4)
    assert ready_work(state) == StepWork(1, 1, 100, 0, 1)
    assert ready_work(replace(state, ready_decodes=8)) == decode_work(state)


def test_below_the_threshold_prefill_pauses_while_something_moves() -> None:
    paused = budget(waiting_tokens=8000, free_pages=49, running_decodes=4, ready_decodes=2)
    assert (paused.bound_by, paused.prefill_tokens, paused.decodes) == ("pause", 0, 2)
    assert budget(waiting_tokens=8000, free_pages=49).bound_by == "WT"


def test_a_step_may_nearly_take_what_those_in_flight_take() -> None:
    """10 + 90 ms. Beside them a shorter one would idle; memory still bounds it."""
    longest = {"work_in_flight": (rows(900), rows(100))}
    assert step_ms(waiting_tokens=80, **longest) == pytest.approx(75.0)
    assert step_ms(waiting_tokens=8000, **longest) == pytest.approx(98.9)
    deep = step_ms(waiting_tokens=80, **longest, pipeline_depth=8)
    assert deep == pytest.approx(100 * (1 - 1 / 16))
    huge = (rows(9900),)
    assert step_ms(waiting_tokens=80, work_in_flight=huge, free_pages=525) == pytest.approx(112.4)


def test_what_steps_in_flight_take_is_predicted_only_when_asked_for() -> None:
    class Untouchable:
        def step_ms(self, work: StepWork) -> float:
            raise AssertionError("asked")

    state = replace(load(waiting_tokens=80, work_in_flight=(rows(9),)), step_times=Untouchable())
    assert make_policy(ThrottleArgs(policy="throttle"))(state).bound_by == "MinP"
    assert load(None, work_in_flight=(rows(9),)).in_flight_ms == 0.0


@pytest.mark.parametrize(("depth", "steps"), [(1, 1), (2, 12), (8, 12)])
def test_prompts_are_spread_over_one_and_a_half_times_as_many_steps_as_by_tokens_at_most(
    depth: int, steps: int
) -> None:
    """Many decodes want it spread as far as may be, but on one stage they gain nothing by it."""
    found = step_ms(waiting_tokens=1440, pipeline_depth=depth, running_decodes=1000 * depth)
    assert found == pytest.approx(10 + 100 + 0.1 * 1440 / steps)


def test_prompts_are_computed_sooner_where_few_decode_or_first_tokens_weigh_more() -> None:
    """On two stages one decode wants 800 tokens in four steps, two thousand in twelve; alone they
    take three."""
    waiting = {"waiting_tokens": 800, "running_decodes": 1}
    assert step_ms(ARGS, Times(), **waiting) == pytest.approx(10 + 0.1 + 80 / 4)
    assert step_ms(waiting_tokens=800, running_decodes=2000) == pytest.approx(10 + 100 + 6.7)
    weighed = replace(ARGS, ttft_weight=1e6)
    assert step_ms(weighed, Times(), **waiting) == pytest.approx(10 + 0.1 + 0.1 * 267)


# Decodes by time


def test_decodes_of_equal_contexts_are_shared_out_by_number() -> None:
    for step_id, number in ((0, 4), (1, 3)):
        found = budget(
            times=Times(attended_ms=1.0),
            step_id=step_id,
            running_decodes=7,
            ready_decodes=7,
            decode_attended_tokens=7 * 500,
        ).time
        assert found is not None and found.decodes is not None
        share = found.decodes
        assert share.share_ms / (share.row_ms + 500 * share.attended_ms) == pytest.approx(number)


def test_contexts_count_by_what_they_take_beside_the_rest_of_a_step() -> None:
    share = budget(
        times=Times(attended_ms=1.0),
        running_decodes=20,
        ready_decodes=20,
        decode_attended_tokens=10**5,
    ).time
    assert share is not None and share.decodes is not None
    # Ten decodes bear 10 + 1 ms; a context of 1000 adds one.
    assert share.decodes.row_ms == pytest.approx(1.1)
    assert share.decodes.attended_ms == pytest.approx(1e-3)


# Targets


def targeted(tpot_ms: float | None = None, ttft_ms: float | None = None) -> ThrottleArgs:
    return ThrottleArgs(policy="throttle-time", target_tpot_ms=tpot_ms, target_ttft_ms=ttft_ms)


def test_a_request_gets_a_token_a_round_so_a_step_may_take_its_share_of_the_target() -> None:
    found = budget(targeted(tpot_ms=60.0), waiting_tokens=8000)
    assert found.time is not None
    assert (found.time.step_ms, found.bound_by, found.missed) == (30.0, "TPOT", None)
    assert budget(targeted(tpot_ms=500.0), waiting_tokens=8000).bound_by == "WT"


def test_a_target_that_decodes_alone_miss_is_said_to_be_missed_and_prompts_go_on() -> None:
    decodes = {"running_decodes": 1000, "ready_decodes": 500}
    found = budget(targeted(tpot_ms=60.0), waiting_tokens=8000, **decodes)
    assert found.time is not None
    assert (found.bound_by, found.missed) == ("MinP", "TPOT")
    assert found.time.step_ms == pytest.approx(60 + 3.2)


def test_prompts_are_computed_faster_where_their_first_token_would_be_late() -> None:
    """In n steps of 10 + 800 / n ms, and one more to pass the pipeline: 8 take 990 ms, 4 1050."""
    found = budget(targeted(ttft_ms=990.0), waiting_tokens=8000)
    assert (found.bound_by, found.missed) == ("WT", None)
    sooner = budget(targeted(ttft_ms=980.0), waiting_tokens=8000)
    # Longer steps would be later still.
    assert (sooner.time, sooner.bound_by, sooner.missed) == (found.time, "WT", "TTFT")
    waited = budget(targeted(ttft_ms=1990.0), waiting_tokens=8000, newest_wait_ms=1000.0)
    assert (waited.bound_by, waited.missed) == ("WT", None)


def test_fewer_longer_steps_hold_a_target_where_each_has_a_high_price() -> None:
    """Beside the decodes in n steps of 105 + 80 / n ms, and one more: 8 take 1035 ms, 3 take 527,
    2 take 435."""
    waiting = {"waiting_tokens": 800, "running_decodes": 100}
    assert budget(targeted(ttft_ms=1040.0), Times(base_ms=100.0), **waiting).bound_by == "WT"
    found = budget(targeted(ttft_ms=500.0), Times(base_ms=100.0), **waiting)
    assert found.time is not None
    assert (found.bound_by, found.missed) == ("TTFT", None)
    assert found.time.step_ms == pytest.approx(105 + 40)


@pytest.mark.parametrize("wait_ms", [0.0, 1e6])
def test_a_first_token_that_is_late_in_any_case_comes_as_soon_as_it_can(wait_ms: float) -> None:
    """One step of 185 ms, and another to pass the pipeline, are done before two of 145."""
    waiting = {"waiting_tokens": 800, "running_decodes": 100, "newest_wait_ms": wait_ms}
    found = budget(targeted(ttft_ms=350.0), Times(base_ms=100.0), **waiting)
    assert found.time is not None
    assert (found.bound_by, found.missed) == ("TTFT", "TTFT")
    assert found.time.step_ms == pytest.approx(105 + 80)


def test_where_both_cannot_be_met_the_time_to_the_first_token_gives() -> None:
    args = targeted(tpot_ms=210.0, ttft_ms=420.0)
    found = budget(args, Times(base_ms=100.0), waiting_tokens=800)
    assert found.time is not None
    assert (found.time.step_ms, found.bound_by, found.missed) == (105.0, "TPOT", "TTFT")


@pytest.mark.parametrize("wrong", [{"target_tpot_ms": 0.0}, {"target_ttft_ms": float("inf")}])
def test_targets_are_times(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="milliseconds above 0"):
        ThrottleArgs(policy="throttle-time", **wrong)  # type: ignore[arg-type]
    (name,) = wrong
    with pytest.raises(ConfigurationError, match="--policy throttle-time"):
        ThrottleArgs(policy="throttle", **{name: 5.0})  # type: ignore[arg-type]


def test_the_weight_of_first_tokens_is_a_number_from_0_on() -> None:
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigurationError, match="--ttft-weight"):
            ThrottleArgs(policy="throttle-time", ttft_weight=wrong)


# Chunks of equal latency under other policies


def test_with_dynamic_chunks_all_take_as_long_as_the_first_of_a_prompt() -> None:
    times = Times(attended_ms=1.0)
    for policy in ("throttle", "sarathi", "throttle-adaptive"):
        plain = make_policy(ThrottleArgs(policy=policy))
        leveled = make_policy(ThrottleArgs(policy=policy, dynamic_chunking=True))
        state = load(times, waiting_tokens=8000)
        found, tokens = leveled(state), plain(state).prefill_tokens
        assert found.prefill_tokens == tokens and found.time is not None
        assert found.time.step_ms == pytest.approx(10 + 0.1 * tokens + tokens * (tokens + 1) / 2e3)
        assert found.time.decodes is None
        assert leveled(load(None, waiting_tokens=8000)) == plain(load(None, waiting_tokens=8000))
