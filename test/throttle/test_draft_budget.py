"""Draft budgets by hand: a step takes 10 ms and a fixed time for each row."""

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.microbatches import LOAD

from sgl_pipeline.pipeline_load import TokenBudget
from sgl_pipeline.step_work import StepWork
from sgl_pipeline.throttle.draft_budget import (
    LEAST_GAIN,
    MOST_EXTRA_TIME,
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


def decodes(count: int) -> StepWork:
    return StepWork(count, count, 100 * count, 0, count)


def test_a_lone_request_gets_what_a_tenth_of_the_step_holds() -> None:
    # 10.2 ms alone; five rows more are 11.2 ms, six would be 11.4.
    assert draft_budget(RowTimes(), decodes(1), [0.9], 8) == (5,)
    # The second is right with a chance of 0.04: 2 * 1.2 tokens * 0.2 ms is more than 0.04 * 10.4.
    assert draft_budget(RowTimes(), decodes(1), [0.2], 8) == (1,)
    assert draft_budget(RowTimes(), decodes(1), [0.9], 3) == (3,)
    assert draft_budget(RowTimes(), decodes(1), [0.0], 8) == (0,)


def test_rows_go_to_the_drafts_that_are_likeliest() -> None:
    # Chances of the next rows: 0.9, 0.81, 0.73, 0.66 of the first, 0.6 of the second.
    assert draft_budget(RowTimes(), decodes(3), [0.9, 0.6, 0.1], 8) == (4, 1, 0)


def test_there_are_none_under_load() -> None:
    # A row more takes 0.2 of 22.8 ms, in which 64 requests draw 0.56 tokens.
    assert least_chance(RowTimes(), decodes(64)) == pytest.approx(2 * 64 * 0.2 / 22.8)
    assert draft_budget(RowTimes(), decodes(64), [1.0] * 64, 8) == (0,) * 64
    assert least_chance(RowTimes(), decodes(16)) == pytest.approx(2 * 16 * 0.2 / 13.2)
    assert sum(draft_budget(RowTimes(), decodes(16), [0.4] * 16, 8)) == 0
    assert sum(draft_budget(RowTimes(), decodes(16), [0.9] * 16, 8)) > 0


def test_there_are_none_where_one_row_takes_too_long() -> None:
    assert least_chance(RowTimes(row_ms=2.0), decodes(1)) == math.inf
    assert draft_budget(RowTimes(row_ms=2.0), decodes(1), [1.0], 8) == (0,)


def test_few_rows_while_times_are_unknown() -> None:
    assert draft_budget(None, decodes(1), [0.5], 8) == (3,)
    assert draft_budget(None, decodes(3), [0.5, 0.9, 0.0], 8) == (0, 1, 0)
    assert least_chance(None, decodes(ROWS_UNTIMED - 1)) == 0.0
    assert least_chance(None, decodes(ROWS_UNTIMED)) == math.inf


@given(
    st.floats(0.01, 3.0),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20),
    st.integers(1, 12),
)
def test_a_budget_keeps_its_bounds(row_ms: float, chances: list[float], most_each: int) -> None:
    times, work = RowTimes(row_ms), decodes(len(chances))
    counts = draft_budget(times, work, chances, most_each)
    pairs = list(zip(counts, chances, strict=True))
    assert all(count <= most_each * (chance > 0) for count, chance in pairs)
    longer = work._replace(tokens=work.tokens + sum(counts))
    assert times.step_ms(longer) <= (1.0 + MOST_EXTRA_TIME) * times.step_ms(work) + 1e-9
    expected = sum(chance**place for count, chance in pairs for place in range(1, count + 1))
    time_lost = times.step_ms(longer) / times.step_ms(work) - 1.0
    assert expected / work.decodes >= LEAST_GAIN * time_lost * 0.999
    if max(chances) < least_chance(times, work):
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
    for _ in range(60):
        acceptance = acceptance.after(0, 0)
    assert acceptance.chance == pytest.approx(0.5, abs=0.01)
