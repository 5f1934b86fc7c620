"""Spread or fill: worked examples of the number of steps, and how it moves with the load."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.step_work import StepWork
from sgl_pipeline.throttle.load_work import decode_work, with_waiting
from sgl_pipeline.throttle.prefill_spread import best_spread, first_tokens_ms, late_decodes_ms
from test.throttle.test_time_throttle import Times, load

TIMES_10 = Times()


def steps(
    most_steps: int = 8, ttft_weight: float = 1.0, times: Times = TIMES_10, **changes: int
) -> int:
    return best_spread(load(times, **changes), times, most_steps, ttft_weight)[0]


def test_a_lone_prompt_on_one_stage_is_computed_at_once() -> None:
    assert steps(pipeline_depth=1, waiting_tokens=800) == 1


def test_a_lone_prompt_in_a_pipeline_is_spread_until_more_steps_end_later() -> None:
    """On two stages it is there after (n + 1) steps of 10 + 40 / n ms: 100, 90 and 93.3."""
    assert steps(waiting_tokens=400) == 2


def test_steps_are_filled_where_they_cost_the_decodes_little() -> None:
    """One stage: n steps take 15 n + 80 ms, 80 more than without the prompt however many."""
    assert steps(pipeline_depth=1, waiting_tokens=800, running_decodes=50) == 1


def test_prefill_is_spread_where_rows_are_free_beside_decodes() -> None:
    """The first 100 rows take the time of the weights: 50 decodes leave 50 of them to each step."""

    class FreeRows(Times):
        def step_ms(self, work: StepWork) -> float:
            return 10.0 + max(0.0, work.tokens - 100) * 0.1

    times = FreeRows()
    assert steps(times=times, pipeline_depth=1, waiting_tokens=400, running_decodes=50) == 8
    # A few wait less for a step of 400 rows than the prompt for eight steps.
    assert steps(times=times, pipeline_depth=1, waiting_tokens=400, running_decodes=2) < 8


def test_delays_add_up_over_all_requests() -> None:
    """Two prompts in four steps of 50 ms on three stages are there after 2 and 4 steps, and the two
    more that pass the pipeline; ten decodes lose 20 ms in six steps."""
    state = load(pipeline_depth=3, waiting_tokens=800, prompts=2, running_decodes=10)
    assert late_decodes_ms(state, 4, 20.0, 20.0) == pytest.approx(10 * 6 * 20.0)
    assert first_tokens_ms(state, 4, 50.0) == pytest.approx((4 + 6) * 50.0)


def test_a_step_as_long_as_those_in_flight_makes_no_stage_wait() -> None:
    """Ten decodes lose 20 ms in four steps, and 5 in the two that pass a pipeline of three."""
    state = load(pipeline_depth=3, waiting_tokens=800, running_decodes=10)
    assert late_decodes_ms(state, 4, 20.0, 5.0) == pytest.approx(10 * (4 * 20.0 + 2 * 5.0))
    assert late_decodes_ms(state, 4, 20.0, 0.0) == pytest.approx(10 * 4 * 20.0)


def test_prompts_end_behind_the_one_that_is_begun() -> None:
    """It has three quarters of four steps: it ends after three, four others evenly up to four."""
    state = load(pipeline_depth=1, waiting_tokens=800, prompts=5, first_prompt_tokens=600)
    assert first_tokens_ms(state, 4, 50.0) == pytest.approx((3 + 3.25 + 3.5 + 3.75 + 4) * 50.0)
    # Without it they end evenly from the first step on.
    state = load(pipeline_depth=1, waiting_tokens=800, prompts=4)
    assert first_tokens_ms(state, 4, 50.0) == pytest.approx((1 + 2 + 3 + 4) * 50.0)
    # Of tokens behind the request that a forecast is for, it does not know the prompts.
    state = load(pipeline_depth=1, waiting_tokens=800, prompts=0)
    assert first_tokens_ms(state, 4, 50.0) == pytest.approx(4 * 50.0)


def test_a_plan_is_kept_while_it_is_carried_out() -> None:
    """A prompt beside decodes, planned anew before each step: it takes as many steps as were
    planned at first, where steps that shrank with what is left would take twice as many."""
    state = {"running_decodes": 12, "prompts": 1}
    planned, step_ms = best_spread(load(waiting_tokens=1200, **state), TIMES_10, 12, 1.0)
    left, taken = 1200, 0
    while left > 0:
        now = load(waiting_tokens=left, **state)
        level_ms = step_ms if taken else 0.0
        num_steps, step_ms = best_spread(now, TIMES_10, 12, 1.0, level_ms)
        left -= -(-left // num_steps)
        taken += 1
    assert planned <= taken <= planned + 1


def test_prompts_of_one_step_end_with_it() -> None:
    """Eight prompts in two steps: four after one, eight after both."""
    state = load(pipeline_depth=1, waiting_tokens=800, prompts=8)
    assert first_tokens_ms(state, 2, 50.0) == pytest.approx((4 * 1 + 4 * 2) * 50.0)


def test_prompts_that_came_together_end_one_by_one_where_rows_bound_a_step() -> None:
    """All in one step end after 90 ms, in three of 36.7 ms after 73 in the mean."""
    waiting = {"pipeline_depth": 1, "waiting_tokens": 800, "prompts": 8}
    assert steps(**waiting) == 3
    assert steps(times=Times(base_ms=100.0), **waiting) == 1


CASES = st.fixed_dictionaries(
    {
        "waiting_tokens": st.integers(1, 50_000),
        "prompts": st.integers(1, 40),
        "running_decodes": st.integers(0, 300),
        "pipeline_depth": st.integers(1, 9),
    }
)
TIMES = st.builds(Times, base_ms=st.floats(0.1, 50), row_ms=st.floats(1e-4, 1.0))


@given(case=CASES, times=TIMES, most=st.integers(1, 2000), weight=st.floats(0.0, 100.0))
def test_it_is_a_number_of_steps_and_their_time(
    case: dict[str, int], times: Times, most: int, weight: float
) -> None:
    state = load(times, **case)
    num_steps, step_ms = best_spread(state, times, most, weight)
    assert 1 <= num_steps <= most
    assert step_ms == times.step_ms(with_waiting(decode_work(state), state, 1, num_steps))


@given(case=CASES, times=TIMES, weight=st.floats(0.0, 50.0), more=st.floats(1.0, 50.0))
def test_the_more_first_tokens_weigh_the_sooner_they_come(
    case: dict[str, int], times: Times, weight: float, more: float
) -> None:
    def waiting_ms(ttft_weight: float) -> float:
        state = load(times, **case)
        num_steps, step_ms = best_spread(state, times, 12, ttft_weight)
        return first_tokens_ms(state, num_steps, step_ms)

    assert waiting_ms(weight + more) <= waiting_ms(weight) * (1 + 1e-9)


@given(case=CASES, times=TIMES, factor=st.floats(0.5, 2.0))
def test_a_factor_on_all_times_changes_nothing(
    case: dict[str, int], times: Times, factor: float
) -> None:
    """A forecast that is a fifth off everywhere decides alike, but for numbers that are equal."""
    scaled = replace(times, base_ms=factor * times.base_ms, row_ms=factor * times.row_ms)
    state = load(times, **case)
    found, step_ms = best_spread(state, times, 12, 1.0)
    other, other_ms = best_spread(load(scaled, **case), scaled, 12, 1.0)
    if found != other:
        alone_ms = times.step_ms(decode_work(state))
        delays = [
            first_tokens_ms(state, steps, ms)
            + late_decodes_ms(state, steps, ms - alone_ms, ms - alone_ms)
            for steps, ms in ((found, step_ms), (other, other_ms / factor))
        ]
        assert delays[0] == pytest.approx(delays[1])


@given(case=CASES, times=TIMES, sees_level=st.booleans())
def test_a_load_that_drains_is_never_met_with_longer_steps(
    case: dict[str, int], times: Times, sees_level: bool
) -> None:
    """No oscillation: prefill that goes as planned leaves steps that get shorter. Near the best
    number several cost the same, so that chunks may swing by a fifth."""
    first_left = left = 1000 + case["waiting_tokens"]
    last_ms = float("inf")
    while left > 500:
        state = load(times, **(case | {"waiting_tokens": left, "prompts": 1}))
        level_ms = last_ms if sees_level and left < first_left else 0.0
        num_steps, step_ms = best_spread(state, times, 12, 1.0, level_ms)
        assert step_ms <= 1.2 * last_ms
        last_ms = min(last_ms, step_ms)
        left -= -(-left // num_steps)


@given(case=CASES, times=TIMES, of_each=st.integers(100, 2000))
def test_prompts_that_drain_are_never_met_with_longer_steps(
    case: dict[str, int], times: Times, of_each: int
) -> None:
    """As above, with prompts that end on the way and then decode. Near the end two steps may come
    where the last of three were planned: half as much more, the most that a search for it found."""
    prompts, last_ms = case["prompts"], float("inf")
    left = of_each * prompts
    while left > 500:
        waiting = -(-left // of_each)
        decodes = case["running_decodes"] + prompts - waiting
        changes = {"waiting_tokens": left, "prompts": waiting, "running_decodes": decodes}
        state = load(times, **(case | changes))
        num_steps, step_ms = best_spread(state, times, 12, 1.0)
        step_ms -= times.step_ms(decode_work(state))
        assert step_ms <= 1.55 * last_ms
        last_ms = min(last_ms, step_ms)
        left -= -(-left // num_steps)
