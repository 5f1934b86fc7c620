"""The planner on worked examples: when it proposes which split, and when it keeps still."""

import pytest
from support.planners import (
    EAGER,
    first_split,
    noise_of,
    note,
    planner_of,
    proposals,
    random_works,
)
from support.served_steps import (
    ServedSteps,
    card_costs,
    decode_step,
    flat_costs,
    mixed_step,
)

from sgl_pipeline.costs.step_costs import RowCost, StepCosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.migration.online_fit import FIRST_FIT_STEPS
from sgl_pipeline.migration.planner_args import MoveProposal, PlannerArgs
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.step_work import StepWork


def output_share_step(ratio: float, prompt_tokens: int = 2048) -> StepWork:
    """A step among requests with prompts of 512 tokens and `ratio` times as many of output: for
    each prompt token so many decodes, and a first token for each prompt."""
    decodes = round(prompt_tokens * ratio)
    return mixed_step(decodes, prompt_tokens, decodes + prompt_tokens // 512)


def test_a_tail_of_three_layers_takes_two_off_the_last_of_four_stages() -> None:
    assert first_split(flat_costs(16, tail_ms=3.0), (4, 4, 4, 4), decode_step(8)) == (4, 5, 5, 2)
    published = PlannerArgs.as_published()
    costs = flat_costs(48, tail_ms=3.09)
    split = first_split(costs, (12, 12, 12, 12), decode_step(8), published)
    assert split == (12, 13, 13, 10)


@pytest.mark.parametrize("args", [EAGER, PlannerArgs.as_published()])
def test_the_longer_outputs_are_the_more_layers_leave_the_last_stage(args: PlannerArgs) -> None:
    last = [
        first_split(card_costs(48), (12, 12, 12, 12), output_share_step(ratio), args)[-1]
        for ratio in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    ]
    assert last[0] == 12
    assert last == sorted(last, reverse=True)
    assert len(set(last)) >= 4
    assert last[-1] <= 9


@pytest.mark.parametrize("args", [EAGER, PlannerArgs.as_published()])
def test_an_output_of_one_token_leaves_the_split_even(args: PlannerArgs) -> None:
    split = (12, 12, 12, 12)
    assert first_split(card_costs(48), split, output_share_step(0.0), args) == split


def test_prefill_puts_the_odd_layer_on_the_last_stage_and_decodes_take_it_off() -> None:
    """Both published observations: (15, 15, 15, 16) beats (16, 15, 15, 15) where prompts are long,
    and layers leave the last stage where outputs are."""
    plain = card_costs(17)
    costs = StepCosts(
        plain.layer, RowCost((1.0, 256.0), (0.01, 0.01), 0.4e-3), plain.tail, plain.layer_weights
    )
    prefill, decodes = mixed_step(0, 2048), decode_step(128)
    assert first_split(costs, (9, 8), prefill) == (8, 9)
    assert first_split(costs, (8, 9), prefill) == (8, 9)
    assert first_split(costs, (9, 8), decodes)[-1] < 8
    assert first_split(costs, (8, 9), decodes)[-1] < 8


def test_a_sparse_layer_counts_for_as_many_dense_ones_as_it_takes() -> None:
    plain = flat_costs(8, tail_ms=0.0)
    costs = StepCosts(plain.layer, plain.embedding, plain.tail, (3.0, 3.0, 1, 1, 1, 1, 1, 1))
    assert first_split(costs, (4, 4), decode_step(8)) == (2, 6)


def test_a_proposal_says_what_it_brings_and_costs() -> None:
    served = ServedSteps(flat_costs(8, tail_ms=2.0), StagePlan(0, (4, 4)))
    args = PlannerArgs(move_price_s=0.01, layer_price_s=0.02)
    ((_, found), *_) = proposals(planner_of(served, args), served, [decode_step(4)] * 60)
    assert found == MoveProposal(
        layer_counts=(5, 3),
        before_ms=pytest.approx((4.0, 6.0)),
        after_ms=pytest.approx((5.0, 5.0)),
        gain_share=pytest.approx(1 / 6),
        moved_layers=1,
        price_s=pytest.approx(0.03),
    )


def test_any_split_can_be_previewed() -> None:
    served = ServedSteps(flat_costs(8, tail_ms=2.0, embedding_ms=0.5), StagePlan(0, (4, 4)))
    planner = planner_of(served)
    assert planner.predict((4, 4)) is None
    assert planner.preview((4, 4), (7, 1)) is None
    note(planner, served.run(decode_step(4)))
    assert planner.predict((1, 7)) == pytest.approx((1.5, 9.0))
    preview = planner.preview((4, 4), (7, 1))
    assert preview is not None
    assert preview.moved_layers == 3
    assert preview.gain_share == pytest.approx(1 - 7.5 / 6.0)


def test_times_are_of_the_windows_steps_alone() -> None:
    served = ServedSteps(card_costs(8), StagePlan(0, (4, 4)))
    planner = planner_of(served)
    for work in [mixed_step(0, 2048)] * 40 + [decode_step(10), decode_step(64)] * 13:
        note(planner, served.run(work))
    window = [decode_step(64)] * 13 + [decode_step(10)] * 12
    expected = [served.truth.stage_times_ms(served.truth.parts_ms(work), (3, 5)) for work in window]
    assert planner.predict((3, 5)) == pytest.approx(
        [sum(times) / 25 for times in zip(*expected, strict=True)]
    )


def test_nothing_is_proposed_before_the_window_is_full() -> None:
    served = ServedSteps(flat_costs(8, tail_ms=2.0), StagePlan(0, (4, 4)))
    found = proposals(planner_of(served), served, [decode_step(4)] * 100)
    assert found[0][0] == 25


ALTERNATING = [decode_step(1, 0), decode_step(200, 0)]  # tails of 0.9 and 1.82 ms; layers of 0.3


def test_a_window_in_which_positions_disagree_proposes_nothing() -> None:
    served = ServedSteps(card_costs(48), StagePlan(0, (12, 12, 12, 12)))
    one, other = (
        first_split(card_costs(48), (12, 12, 12, 12), work, PlannerArgs.as_published())
        for work in ALTERNATING
    )
    assert one != other
    unanimous = planner_of(served, PlannerArgs.as_published())
    assert not proposals(unanimous, served, ALTERNATING * 100)


def test_the_accumulated_reading_takes_the_windows_sum() -> None:
    served = ServedSteps(card_costs(48), StagePlan(0, (12, 12, 12, 12)))
    accumulated = planner_of(served, PlannerArgs.as_published(reading="accumulated"))
    found = proposals(accumulated, served, ALTERNATING * 100)
    assert len(found) > 100
    # The mean tail of 1.3 to 1.4 ms is as long as 4.5 layers: three leave, whose places add one.
    assert {proposal.layer_counts for _, proposal in found} == {(13, 13, 13, 9)}


@pytest.mark.parametrize("window_steps", [1, 10, 25])
def test_the_published_window_is_as_many_equal_steps(window_steps: int) -> None:
    served = ServedSteps(flat_costs(48, tail_ms=3.09), StagePlan(0, (12, 12, 12, 12)))
    planner = planner_of(served, PlannerArgs.as_published(window_steps))
    found = proposals(planner, served, [decode_step(8)] * 60)
    assert found[0][0] == window_steps


def test_no_stage_is_given_more_than_it_may_hold() -> None:
    served = ServedSteps(flat_costs(16, tail_ms=6.0), StagePlan(0, (4, 4, 4, 4)))
    # The third stage holds what it gives and what it gets together: (5, 5, 5, 1) needs 7.
    for args, split in ((EAGER, (4, 4, 6, 2)), (PlannerArgs.as_published(), (4, 5, 5, 2))):
        planner = planner_of(served, args, max_layers=(4, 5, 6, 4))
        found = proposals(planner, served, [decode_step(8)] * 100)
        assert {proposal.layer_counts for _, proposal in found} == {split}
        assert planner.is_allowed((4, 4, 4, 4), split)
        assert not planner.is_allowed((4, 4, 4, 4), (5, 5, 5, 1))


def test_limits_may_change_while_it_runs() -> None:
    served = ServedSteps(flat_costs(16, tail_ms=6.0), StagePlan(0, (4, 4, 4, 4)))
    planner = planner_of(served, EAGER, max_layers=(4, 4, 4, 4))
    assert not proposals(planner, served, [decode_step(8)] * 100)
    planner.max_layers = (4, 4, 5, 4)
    found = proposals(planner, served, [decode_step(8)] * 100)
    assert {proposal.layer_counts for _, proposal in found} == {(4, 4, 5, 3)}


@pytest.mark.parametrize(("price_s", "after_steps"), [(0.005, 25), (0.009, 30), (0.099, 120)])
def test_a_move_is_proposed_once_staying_has_cost_as_much(price_s: float, after_steps: int) -> None:
    """Each step loses 1 ms: 5 ms by the first evaluation after 25 steps, and 5 ms by each other."""
    served = ServedSteps(flat_costs(8, tail_ms=2.0), StagePlan(0, (4, 4)))
    planner = planner_of(served, PlannerArgs(layer_price_s=price_s))
    assert proposals(planner, served, [decode_step(4)] * 200)[0][0] == after_steps


def test_what_staying_has_cost_is_forgotten_where_staying_is_best() -> None:
    served = ServedSteps(flat_costs(8, tail_ms=2.0), StagePlan(0, (4, 4)))
    planner = planner_of(served, PlannerArgs(layer_price_s=0.05))
    assert not proposals(planner, served, [decode_step(4)] * 60)
    served.plan = StagePlan(1, (5, 3))
    planner.forecast.know_plan(served.plan)
    assert not proposals(planner, served, [decode_step(4)] * 10)
    served.plan = StagePlan(2, (4, 4))
    planner.forecast.know_plan(served.plan)
    assert proposals(planner, served, [decode_step(4)] * 60)[0][0] >= 46


def test_the_price_of_a_layer_is_learned_from_moves() -> None:
    served = ServedSteps(flat_costs(8, tail_ms=2.0), StagePlan(0, (4, 4)))
    planner = planner_of(served, PlannerArgs())
    for _ in range(2):  # the first one may have been slow
        planner.prices.learn([0], stalled_s=0.7, shared_s=1.0, patched_bytes=9)
    assert not proposals(planner, served, [decode_step(4)] * 1000)
    planner.prices.learn([0, 1], stalled_s=0.02, shared_s=0.0, patched_bytes=9)
    assert proposals(planner, served, [decode_step(4)] * 5)


def test_the_published_rule_moves_layers_again_whatever_the_last_move_cost() -> None:
    served = ServedSteps(flat_costs(8, tail_ms=2.0), StagePlan(0, (4, 4)))
    planner = planner_of(served, PlannerArgs.as_published())
    planner.prices.learn([0], stalled_s=0.7, shared_s=1.0, patched_bytes=9)
    found = proposals(planner, served, [decode_step(4)] * 30)
    assert found[0][1].layer_counts == (5, 3)
    assert found[0][1].price_s == 0.0


def test_a_small_gain_is_not_worth_a_move() -> None:
    served = ServedSteps(flat_costs(8, tail_ms=2.0), StagePlan(0, (4, 4)))
    for share, is_worth_it in ((0.166, True), (0.167, False)):
        args = PlannerArgs(min_gain_share=share, layer_price_s=0.0)
        found = proposals(planner_of(served, args), served, [decode_step(4)] * 100)
        assert bool(found) == is_worth_it


def test_what_limits_leave_of_a_gain_has_to_be_worth_it() -> None:
    """Without limits six layers would leave the last stage; one of 24 gains 4 %."""
    served = ServedSteps(flat_costs(64, tail_ms=8.0), StagePlan(0, (16, 16, 16, 16)))
    for share, is_worth_it in ((0.04, True), (0.05, False)):
        args = PlannerArgs(min_gain_share=share, layer_price_s=0.0)
        planner = planner_of(served, args, max_layers=(16, 16, 17, 16))
        assert bool(proposals(planner, served, [decode_step(4)] * 100)) == is_worth_it


def test_after_a_move_the_count_of_what_was_lost_begins_anew() -> None:
    served = ServedSteps(flat_costs(8, tail_ms=2.0), StagePlan(0, (4, 4)))
    planner = planner_of(served, PlannerArgs(layer_price_s=0.05))
    assert not proposals(planner, served, [decode_step(4)] * 65)
    planner.moved()
    assert proposals(planner, served, [decode_step(4)] * 100)[0][0] == 50


def test_without_costs_it_learns_them_and_then_proposes() -> None:
    served = ServedSteps(card_costs(16), StagePlan(0, (4, 4, 4, 4)), noise=noise_of(4, 0.05))
    planner = planner_of(served, knows_costs=False)
    found = proposals(planner, served, random_works(5, 400))
    assert found[0][0] >= FIRST_FIT_STEPS
    assert found[0][1].layer_counts[-1] < 4


def test_a_single_stage_has_nothing_to_move() -> None:
    served = ServedSteps(flat_costs(4, tail_ms=9.0), StagePlan(0, (4,)))
    assert not proposals(planner_of(served), served, [decode_step(4)] * 100)


@pytest.mark.parametrize(
    "wrong",
    [
        {"window_steps": 0},
        {"evaluate_steps": 26},
        {"move_price_s": -1.0},
        {"layer_price_s": -0.1},
        {"state_byte_price_s": -1.0},
    ],
)
def test_senseless_arguments_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        PlannerArgs(**wrong)


def test_the_predictor_can_be_asked_for() -> None:
    served = ServedSteps(flat_costs(4, tail_ms=1.0), StagePlan(0, (2, 2)))
    assert isinstance(planner_of(served).forecast.predictor, StepPredictor)
