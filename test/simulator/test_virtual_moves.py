"""Layers that move in virtual time: by hand, and what must not change with them."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from support.virtual_runs import TokenSeconds, requests, run_by_hand, scheduler

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.records.move_record import MoveOutcome
from sgl_pipeline.simulator.page_copies import MoveCosts
from sgl_pipeline.simulator.pipeline_costs import PipelineCosts, SimulatedLink
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest


def spans(simulation: Simulation, step: int) -> list[tuple[float, float]]:
    """When each stage ran a step."""
    found = simulation.steps[step]
    return [
        (pytest.approx(start), pytest.approx(end))
        for start, end in zip(found.starts_s, found.ends_s, strict=True)
    ]


# A page of a layer is 32 bytes, of which the link carries one a second; weights take a second.
SLOW_MOVES = MoveCosts(
    kv_bytes_per_token=8,
    page_size=4,
    weight_bytes=10,
    weight_bytes_per_s=10.0,
    latency_s=0.25,
    bytes_per_s=32.0,
)


def test_a_move_by_hand() -> None:
    costs = PipelineCosts(TokenSeconds(), layer_counts=(1, 2))
    workload = requests((0.0, 4, 8))
    simulation = run_by_hand(costs, workload, SLOW_MOVES, [(13.5, (2, 1))])
    (move,) = simulation.moves
    assert spans(simulation, 1) == [(12.0, 13.0), (13.0, 15.0)]
    # Stage 1 takes the order after step 1, at 15, when the weights at stage 0 have been there for
    # half a second. Of its two pages it sends 24 bytes until step 2 comes at 16 ...
    assert spans(simulation, 2) == [(15.0, 16.0), (16.0, 18.0)]
    # ... 6.4 in the 0.2 seconds after it, 25.6 from there until step 3, 6.4 after that one.
    assert spans(simulation, 3) == [(18.0, 19.0), (19.0, 21.0)]
    # The last 1.6 bytes are sent at 21.25: ready, while step 4 of the old plan is on its way.
    assert move.switched_s == pytest.approx(21.25)
    assert spans(simulation, 4) == [(21.0, 22.0), (22.0, 24.0)]
    # One page was written since: a second from 24 on, and a quarter on its way. Step 5 runs its
    # first layer at stage 0 meanwhile and waits a quarter of a second before the second one.
    assert spans(simulation, 5) == [(24.0, 26.25), (26.25, 27.25)]
    assert spans(simulation, 6) == [(27.25, 29.25), (29.25, 30.25)]
    assert [step.record.epoch for step in simulation.steps] == [0] * 5 + [1] * 3
    assert move.outcome is MoveOutcome.DONE
    assert (move.began_s, move.ended_s) == (13.5, pytest.approx(25.25))
    assert (move.copied_bytes, move.patched_bytes) == (64, 32)
    assert (move.load_ms, move.patch_ms, move.wait_ms) == pytest.approx((1000.0, 1000.0, 250.0))


def test_a_layer_with_states_waits_for_the_state_that_the_last_step_wrote() -> None:
    costs = PipelineCosts(TokenSeconds(), layer_counts=(1, 2))
    moves = replace(SLOW_MOVES, state_bytes=(32, 32, 0))
    simulation = run_by_hand(
        costs, requests((0.0, 4, 8)), moves, [(13.5, (2, 1))], num_state_slots=3
    )
    (move,) = simulation.moves
    # As by pages, 24 bytes go from 15.25 until step 2 comes; it writes the state, so that nothing
    # is left before the switch.
    assert spans(simulation, 2) == [(15.0, 16.0), (16.0, 18.0)]
    assert move.switched_s == pytest.approx(18.0)
    # The state is sent from 18 to 19 and is there at 19.25; step 3 takes it up when it has run the
    # first layer, in a second.
    assert spans(simulation, 3) == [(18.0, 21.0), (21.0, 22.0)]
    assert (move.copied_bytes, move.patched_bytes) == (24, 32)
    assert (move.patch_ms, move.wait_ms) == pytest.approx((1000.0, 1000.0))


def test_copies_beside_the_steps_cost_them_nothing_but_the_wait() -> None:
    costs = PipelineCosts(TokenSeconds(), layer_counts=(1, 2))
    beside = replace(SLOW_MOVES, copying="beside")
    simulation = run_by_hand(costs, requests((0.0, 4, 8)), beside, [(13.5, (2, 1))])
    (move,) = simulation.moves
    # From 15.25 for two seconds, whatever runs; step 2 is back at 18 and step 3 the first new one.
    assert move.switched_s == pytest.approx(17.25)
    # The page that step 2 wrote leaves at 18 and is there at 19.25, when layer 0 has been run.
    assert spans(simulation, 3) == [(18.0, 20.25), (20.25, 21.25)]
    assert (move.copied_bytes, move.patched_bytes) == (64, 32)
    assert move.wait_ms == pytest.approx(250.0)


def test_nothing_is_copied_before_the_target_has_the_weights() -> None:
    costs = PipelineCosts(TokenSeconds(), layer_counts=(1, 2))
    slow = replace(SLOW_MOVES, copying="beside", weight_bytes_per_s=2.0)
    (move,) = run_by_hand(costs, requests((0.0, 4, 8)), slow, [(13.5, (2, 1))]).moves
    # Stage 0 reads for five seconds, then two pages take a second each.
    assert (move.load_ms, move.switched_s) == pytest.approx((5000.0, 18.5 + 0.25 + 2.0))


def test_a_busy_stage_gives_a_tenth_of_its_time() -> None:
    costs = PipelineCosts(TokenSeconds(), layer_counts=(1, 2))
    load = requests((0.0, 16, 30), (49.0, 1, 30))
    simulation = run_by_hand(costs, load, SLOW_MOVES, [(60.0, (2, 1))])
    (move,) = simulation.moves
    starts = [step.starts_s[1] for step in simulation.steps if step.record.epoch == 0]
    # Two requests in turns keep stage 1 busy: a step of one token every two seconds, then 2.2.
    gaps = [
        (end > 62.5, pytest.approx(end - start))
        for start, end in pairwise(one for one in starts if one > 52.0)
    ]
    assert gaps.count((False, 2.0)) >= 3
    assert gaps.count((True, 2.2)) >= 10
    # Stage 1 sends 6.4 bytes between two steps, and never more.
    assert move.switched_s is not None
    assert move.copied_bytes / 6.4 * 2.2 == pytest.approx(move.switched_s - 62.0, abs=4.4)


def test_on_a_shared_link_rows_wait_for_a_parcel_and_pages_for_rows() -> None:
    costs = PipelineCosts(
        TokenSeconds(), layer_counts=(2, 1), link=SimulatedLink(bytes_per_s=8.0, bytes_per_token=4)
    )
    load, wishes = requests((0.0, 4, 8)), [(14.5, (1, 2))]
    beside = replace(SLOW_MOVES, copying="beside", weight_bytes=0)
    own = run_by_hand(costs, load, beside, wishes)
    shared = run_by_hand(costs, load, replace(beside, shares_links=True), wishes)
    # Stage 1 is there at 17.5: two pages are copied from 17.75 to 19.75.
    assert spans(own, 2) == [(17.5, 19.5), (20.0, 21.0)]
    assert own.moves[0].switched_s == pytest.approx(19.75)
    # The row of step 2 leaves stage 0 at 19.5. It waits for the last 8 bytes, a quarter of a
    # second, and these for the half that it takes itself.
    assert spans(shared, 2) == [(17.5, 19.5), (20.25, 21.25)]
    assert shared.moves[0].switched_s == pytest.approx(20.25)


def test_pages_and_rows_in_opposite_directions_do_not_meet() -> None:
    costs = PipelineCosts(
        TokenSeconds(), layer_counts=(1, 2), link=SimulatedLink(bytes_per_s=8.0, bytes_per_token=4)
    )
    load, wishes = requests((0.0, 4, 8)), [(15.5, (2, 1))]
    beside = replace(SLOW_MOVES, copying="beside")
    shared = replace(beside, shares_links=True)
    assert run_by_hand(costs, load, shared, wishes) == run_by_hand(costs, load, beside, wishes)


def random_load(seed: int, count: int) -> list[SimulatedRequest]:
    random = Random(seed)
    return requests(
        *(
            (random.uniform(0.0, 400.0), random.randint(1, 60), random.randint(1, 20))
            for _ in range(count)
        )
    )


@pytest.mark.parametrize("copying", ["stage", "beside"])
@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_once_with_the_tokens_it_has_without_moves(
    seed: int, copying: str
) -> None:
    random = Random(seed)
    counts = (2, 3, 3)
    wishes, split = [], counts
    for number in range(12):
        before = split
        while split == before:
            low, high = sorted(random.sample(range(1, 8), 2))
            split = (low, high - low, 8 - high)
        wishes.append((number * 40.0, split))
    moves = replace(SLOW_MOVES, copying=copying, bytes_per_s=32000.0, shares_links=bool(seed % 2))
    costs = PipelineCosts(TokenSeconds(tail=0.1, token=0.02), layer_counts=counts)
    load = random_load(seed, 60)
    still = run_by_hand(costs, load, moves, [])
    moving = run_by_hand(costs, load, moves, wishes)
    assert {one.outcome for one in moving.moves} == {MoveOutcome.DONE}
    assert len(moving.moves) >= 5
    for simulation in (still, moving):
        assert len(simulation.requests) == 60
        assert all(served.finished_s is not None for served in simulation.requests)
        for served in simulation.requests:
            assert len(served.token_times_s) == served.asked.output_tokens
            assert served.token_times_s == sorted(served.token_times_s)
    for step, later in pairwise(moving.steps):
        # First in, first out on every stage, whatever moves.
        assert all(a <= b for a, b in zip(step.ends_s, later.starts_s, strict=True))
        assert step.record.epoch <= later.record.epoch
    # A step runs under the plan of its epoch: its stages take what their layers take, and more only
    # where they wait for pages.
    splits = [counts, *(one.after for one in moving.moves)]
    for step in moving.steps:
        expected = costs.under(splits[step.record.epoch]).stage_seconds(step.shape, 0)
        for start, end, seconds in zip(step.starts_s, step.ends_s, expected, strict=True):
            assert end - start >= seconds * (1 - 1e-9)
    waits_s = sum(
        sum(step.ends_s)
        - sum(step.starts_s)
        - sum(costs.under(splits[step.record.epoch]).stage_seconds(step.shape, 0))
        for step in moving.steps
    )
    assert waits_s <= sum(one.wait_ms for one in moving.moves) * 1e-3 * len(counts) + 1e-6


def test_a_pipeline_in_which_nothing_moves_is_as_one_that_cannot() -> None:
    costs = PipelineCosts(TokenSeconds(tail=2.0), (2, 3, 3))
    load = random_load(1, 60)
    plain = VirtualPipeline(scheduler(3), costs).run(load)
    assert run_by_hand(costs, load, SLOW_MOVES, []) == plain
    assert plain.moves == ()


def test_recorded_stages_cannot_move() -> None:
    from sgl_pipeline.simulator.calibration import FittedCosts
    from sgl_pipeline.simulator.pipeline_costs import HostCosts

    fitted = FittedCosts((), (), SimulatedLink(), HostCosts(), ())
    with pytest.raises(ConfigurationError, match="--calibrate"):
        fitted.under((1,))
