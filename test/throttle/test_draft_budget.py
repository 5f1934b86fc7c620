"""Draft budgets by hand: a step takes 10 ms and a fixed time for each row."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.microbatches import LOAD

from sgl_pipeline.pipeline_load import TokenBudget
from sgl_pipeline.step_work import StepTimes, StepWork
from sgl_pipeline.throttle.draft_budget import (
    LEAST_GAIN,
    MOST_EXTRA_TIME,
    MOST_ROWS,
    ROWS_UNTIMED,
    Acceptance,
    draft_budget,
    least_chance,
    may_draft,
)


@dataclass(frozen=True)
class RowTimes:
    """10 ms for the weights, `row_ms` for each row."""

    row_ms: float = 0.2

    def step_ms(self, work: StepWork) -> float:
        return 10.0 + self.row_ms * work.tokens


@dataclass(frozen=True)
class StairTimes:
    """The time of each number of rows from one on."""

    by_rows: tuple[float, ...]

    def step_ms(self, work: StepWork) -> float:
        return self.by_rows[work.tokens - 1]


def decodes(count: int) -> StepWork:
    return StepWork(count, count, 100 * count, 0, count)


def evenly(chances: Sequence[float], most_each: int) -> list[list[float]]:
    """Drafts of `most_each` tokens with the same chance; none where it is 0."""
    return [[chance] * most_each * (chance > 0) for chance in chances]


def shared(
    times: StepTimes | None, work: StepWork, chances: Sequence[float], most_each: int = 8
) -> tuple[int, ...]:
    return draft_budget(times, work, evenly(chances, most_each), is_alone=False)


def alone(times: StepTimes | None, chance: float, most_each: int = 8) -> int:
    return draft_budget(times, decodes(1), evenly([chance], most_each), is_alone=True)[0]


def least(times: StepTimes | None, num_decodes: int) -> float:
    return least_chance(times, decodes(num_decodes), is_alone=False)


def test_a_step_gets_at_most_a_tenth_longer_where_others_wait_for_it() -> None:
    # 10.2 ms alone; five rows more are 11.2 ms, six would be 11.4.
    assert shared(RowTimes(), decodes(1), [0.9]) == (5,)
    assert alone(RowTimes(), 0.9) == 8


def test_a_lone_request_gets_what_gives_the_most_tokens_in_a_time() -> None:
    # 1.2 tokens in 10.4 ms, 1.24 in 10.6, 1.248 in 10.8.
    assert alone(RowTimes(), 0.2) == 2
    assert alone(RowTimes(), 0.9, most_each=3) == 3
    assert alone(RowTimes(), 0.0) == 0
    # The fifth row takes long, and the next three come with it.
    steps = StairTimes((10.0, 10.5, 10.5, 10.5, 12.0, 12.0, 12.0, 12.0, 17.0))
    assert [alone(steps, chance) for chance in (0.9, 0.6, 0.2, 0.02)] == [7, 3, 3, 0]


def test_rows_go_to_the_drafts_that_are_likeliest() -> None:
    # Chances of the next rows: 0.9, 0.81, 0.73, 0.66 of the first, then 0.6 of the second; five
    # rows are a tenth of 10.6 ms.
    assert shared(RowTimes(), decodes(3), [0.9, 0.6, 0.1]) == (4, 1, 0)


def test_a_likely_token_behind_an_unlikely_one_is_as_unlikely() -> None:
    # Chances of the next rows: 0.9, 0.81, 0.4 of the first, then 0.3 and 0.3 of the second.
    drafts = [[0.9, 0.9, 0.5], [0.3, 1.0, 0.1]]
    assert draft_budget(RowTimes(), decodes(2), drafts, is_alone=False) == (3, 2)
    assert draft_budget(None, decodes(2), drafts, is_alone=False) == (2, 0)


def test_there_are_none_under_load() -> None:
    # A row more takes 0.2 of 22.8 ms, in which 64 requests draw 0.56 tokens.
    assert least(RowTimes(), 64) == pytest.approx(2 * 64 * 0.2 / 22.8)
    assert shared(RowTimes(), decodes(64), [1.0] * 64) == (0,) * 64
    assert least(RowTimes(), 16) == pytest.approx(2 * 16 * 0.2 / 13.2)
    assert sum(shared(RowTimes(), decodes(16), [0.4] * 16)) == 0
    assert sum(shared(RowTimes(), decodes(16), [0.9] * 16)) > 0


def test_there_are_none_where_one_row_takes_too_long() -> None:
    assert least(RowTimes(row_ms=2.0), 1) == math.inf
    assert shared(RowTimes(row_ms=2.0), decodes(1), [1.0]) == (0,)


def test_few_rows_while_times_are_unknown() -> None:
    assert alone(None, 0.5) == 3
    assert shared(None, decodes(3), [0.5, 0.9, 0.0]) == (0, 1, 0)
    assert shared(None, decodes(9), [0.5] * 9) == (0,) * 9
    assert least(None, ROWS_UNTIMED - 1) == 0.0
    assert least(None, ROWS_UNTIMED) == math.inf


@given(
    st.floats(0.01, 3.0),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20),
    st.integers(1, 12),
    st.booleans(),
)
def test_a_budget_keeps_its_bounds(
    row_ms: float, chances: list[float], most_each: int, is_alone: bool
) -> None:
    times, work = RowTimes(row_ms), decodes(len(chances))
    counts = draft_budget(times, work, evenly(chances, most_each), is_alone=is_alone)
    pairs = list(zip(counts, chances, strict=True))
    assert all(count <= most_each * (chance > 0) for count, chance in pairs)
    assert sum(counts) <= MOST_ROWS
    longer = work._replace(tokens=work.tokens + sum(counts))
    time_lost = times.step_ms(longer) / times.step_ms(work) - 1.0
    assert is_alone or time_lost <= MOST_EXTRA_TIME + 1e-9
    expected = sum(chance**place for count, chance in pairs for place in range(1, count + 1))
    assert expected / work.decodes >= LEAST_GAIN * time_lost * 0.999
    if max(chances) < least_chance(times, work, is_alone=is_alone) * 0.999:
        assert sum(counts) == 0


@pytest.mark.parametrize(
    ("load", "bound_by", "may"),
    [
        (replace(LOAD, waiting_tokens=0), "WT", True),
        (LOAD, "WT", False),
        (replace(LOAD, waiting_tokens=0, loading_tokens=3), "WT", False),
        (replace(LOAD, waiting_tokens=0), "pause", False),
    ],
    ids=["decodes alone", "a prompt waits", "pages are loaded", "the pause"],
)
def test_drafts_yield_to_prompts_and_to_memory(load, bound_by, may) -> None:
    assert may_draft(load, TokenBudget(9, 1, bound_by)) == may


def test_the_expected_chance_follows_what_was_right() -> None:
    acceptance = Acceptance()
    assert acceptance.chance == 0.5
    # Of three the first was right, the second wrong, the third unchecked: (1 + 1) / (2 + 2).
    assert acceptance.after(3, 1).chance == 0.5
    assert acceptance.after(3, 3).chance == 0.8
    for _ in range(60):
        acceptance = acceptance.after(4, 4)
    assert acceptance.chance > 0.97
    for _ in range(20):
        acceptance = acceptance.after(1, 0)
    assert acceptance.chance < 0.45
    for _ in range(600):
        acceptance = acceptance.after(0, 0)
    assert acceptance.chance == pytest.approx(0.5, abs=0.01)


def test_a_request_whose_drafts_are_wrong_is_seldom_tried_again() -> None:
    acceptance, trials = Acceptance(), 0
    for _ in range(128):
        is_tried = acceptance.chance >= 0.25
        trials += is_tried
        acceptance = acceptance.after(4 if is_tried else 0, 0)
    assert 3 < trials < 16
