"""A replay counts what a pipeline with drafts would have done."""

import pytest

from benchmark.speculation.draft_acceptance import RowTimes, ends_in_loop, relative_times
from benchmark.speculation.prompts import KINDS
from benchmark.speculation.replay import (
    Answer,
    DraftedStep,
    budget_of_one,
    drafted_steps,
    fixed_budget,
    num_equal,
    speed_up,
    tokens_per_step,
)
from sgl_pipeline.scheduling.ngram_drafts import NgramRange
from sgl_pipeline.throttle.draft_budget import Acceptance


def test_copied_output_takes_one_step_for_each_draft() -> None:
    answer = Answer([1, 2, 3, 4, 5, 6, 7, 8, 9, 1], [2, 3, 4, 5, 6, 7, 8, 9])
    steps = list(drafted_steps(answer, NgramRange(1, 2), fixed_budget(3)))
    # Three drafts and a token, then the three that are left, of which the last is no draft.
    assert steps == [DraftedStep(3, 3), DraftedStep(2, 2)]
    assert tokens_per_step(steps) == 3.5


def test_new_tokens_are_not_drafted() -> None:
    steps = list(drafted_steps(Answer([1, 2, 3], [4, 5, 6, 7]), NgramRange(1, 3), fixed_budget(4)))
    assert steps == [DraftedStep(0, 0)] * 3
    assert speed_up(steps, {1: 1.0}) == 1.0


def test_steps_give_the_whole_output() -> None:
    output_ids = [1, 2, 1, 2, 1, 3, 1, 2, 1, 2, 9]
    for num_drafts in range(6):
        budget = fixed_budget(num_drafts)
        steps = drafted_steps(Answer([5, 1], output_ids), NgramRange(1, 2), budget)
        assert sum(1 + step.accepted for step in steps) == len(output_ids) - 1


def test_the_budget_follows_acceptance_and_times() -> None:
    budget = budget_of_one(RowTimes(relative_times("1:10,2:10.2,3:10.4,4:10.6,5:20")), 9)
    right, wrong = Acceptance(), Acceptance()
    for _ in range(40):
        right, wrong = right.after(3, 3), wrong.after(3, 0)
    assert (budget(right), budget(wrong)) == (3, 1)


def test_longer_steps_cost_what_their_rows_cost() -> None:
    steps = [DraftedStep(2, 2), DraftedStep(2, 0), DraftedStep(0, 0)]
    assert speed_up(steps, {1: 1.0, 3: 1.5}) == pytest.approx(5 / 4)


def test_times_between_known_rows_are_interpolated() -> None:
    assert relative_times("1:2,3:4") == {1: 1.0, 2: 1.5, 3: 2.0}


def test_common_prefix() -> None:
    assert num_equal([1, 2, 3], [1, 2, 4]) == 2
    assert num_equal([1], [1, 2]) == 1
    assert num_equal([], [1]) == 0


def test_loops_are_found_at_the_end_alone() -> None:
    assert ends_in_loop([*range(100), *[1, 2, 3] * 20])
    assert not ends_in_loop([*[1, 2, 3] * 20, *range(100)])


def test_kinds_have_prompts_of_their_own_but_that_without_the_schema() -> None:
    kinds = {name: of_kind() for name, of_kind in KINDS.items()}
    assert kinds.pop("JSON, same prompts") == kinds["JSON by schema"]
    prompts = [prompt for of_kind in kinds.values() for prompt in of_kind]
    assert len(prompts) == len(set(prompts)) == 40
    assert all(len(of_kind) == 8 for of_kind in kinds.values())
