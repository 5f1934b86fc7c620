"""The server's planner in virtual time: where it ends, and what it does about slow stages."""

from functools import cache

import pytest
from support.splits import all_splits
from support.virtual_runs import AUTO, TokenSeconds, run_planned, scheduler

from sgl_pipeline.migration.planner_args import PlannerArgs
from sgl_pipeline.records.move_record import MoveOutcome
from sgl_pipeline.simulator.migration_setup import Migration
from sgl_pipeline.simulator.pipeline_costs import PipelineCosts
from sgl_pipeline.simulator.stage_clock import Slowdown
from sgl_pipeline.simulator.summary import bubble_share, summarize
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds

pytestmark = pytest.mark.slow


def steady_load(num_clients: int, answers: int) -> list[SimulatedRequest]:
    """Clients that ask again as soon as they are answered."""
    ids = TokenIds()
    return [
        SimulatedRequest.chain(
            [
                SimulatedRequest(arrival_s=0.0, prompt=(ids.fresh(4),), output=ids.fresh(25))
                for _ in range(answers)
            ]
        )
        for _ in range(num_clients)
    ]


EAGER = PlannerArgs(layer_price_s=0.01)
PARTS = TokenSeconds(step=0.01, tail=0.03)


def test_in_each_step_all_stages_but_the_last_idle_for_the_tail() -> None:
    """DynaPipe: a decode step adds (stages - 1) bubbles as long as its sampling."""
    steady = VirtualPipeline(scheduler(3), PipelineCosts(PARTS, (4, 4, 4))).run(steady_load(9, 20))
    assert bubble_share(steady) == pytest.approx(2 * 0.03 / (3 * (4 * 0.01 + 0.03)), abs=0.01)
    moved = VirtualPipeline(scheduler(3), PipelineCosts(PARTS, (5, 5, 2))).run(steady_load(9, 20))
    assert bubble_share(moved) == pytest.approx(0.0, abs=0.01)


@cache
def tokens_per_s_of_all_splits() -> dict[tuple[int, ...], float]:
    """What each split serves of a steady load, without a planner."""
    return {
        split: summarize(
            VirtualPipeline(scheduler(3), PipelineCosts(PARTS, split)).run(steady_load(9, 2))
        ).output_tokens_per_s
        for split in all_splits(12, 3)
    }


@pytest.mark.parametrize("knows_costs", [True, False])
@pytest.mark.parametrize("start", [(4, 4, 4), (10, 1, 1), (1, 1, 10)])
def test_on_a_steady_load_the_planner_ends_with_the_best_of_all_splits(
    start: tuple[int, ...], knows_costs: bool
) -> None:
    tokens_per_s = tokens_per_s_of_all_splits()
    best = max(tokens_per_s.values())
    migration = Migration(args=AUTO, planner=EAGER)
    simulation = run_planned(
        PipelineCosts(PARTS, start), steady_load(9, 25), migration, knows_costs=knows_costs
    )
    last = simulation.moves[-1]
    assert last.outcome is MoveOutcome.DONE
    assert tokens_per_s[last.after] == pytest.approx(best)
    assert tokens_per_s[start] < 0.9 * best


def test_layers_leave_a_stage_that_has_become_slow() -> None:
    costs = PipelineCosts(TokenSeconds(step=0.01), (4, 4, 4))
    slow = [Slowdown(stage=1, from_s=20.0, factor=2.0)]
    load = steady_load(9, 35)
    moving = run_planned(costs, load, Migration(args=AUTO, planner=EAGER), slow)
    still = VirtualPipeline(scheduler(3), costs, slowdowns=slow).run(load)
    assert moving.moves[0].began_s > 20.0
    # 5 + 2 x 2 + 5 of 12 layers' time: the slowest stage takes 5 layers' time and not 8.
    assert moving.moves[-1].after == (5, 2, 5)
    assert summarize(moving).output_tokens_per_s > 1.3 * summarize(still).output_tokens_per_s


def test_a_stage_that_recovers_gets_its_layers_back() -> None:
    costs = PipelineCosts(TokenSeconds(step=0.01), (4, 4, 4))
    slow = [Slowdown(stage=0, from_s=20.0, factor=2.0, until_s=60.0)]
    moving = run_planned(costs, steady_load(9, 45), Migration(args=AUTO, planner=EAGER), slow)
    assert (2, 5, 5) in [move.after for move in moving.moves]
    assert moving.moves[-1].after == (4, 4, 4)


def test_layers_that_are_not_equal_move_by_their_weight() -> None:
    costs = PipelineCosts(
        TokenSeconds(step=0.01), (4, 4), layer_weights=(3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    )
    simulation = run_planned(costs, steady_load(8, 20), Migration(args=AUTO, planner=EAGER))
    assert simulation.moves[-1].after == (2, 6)
    shape = simulation.steps[-1].shape
    assert costs.under((2, 6)).stage_seconds(shape, 0) == pytest.approx((0.06, 0.06))
    assert costs.seconds_before(shape, 1, 6) == pytest.approx(0.02)
