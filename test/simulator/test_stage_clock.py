"""Two steps on one stage, against schedules made by hand."""

from random import Random

import pytest

from sgl_pipeline.simulator.stage_clock import SharedStageClock, StageClock


def test_one_step_at_a_time_waits_alone() -> None:
    clock = StageClock()
    assert clock.run(1.0, 4.0, 2.0) == (1.0, 7.0)
    assert clock.free_s == 7.0


def test_the_younger_step_computes_while_the_older_waits() -> None:
    clock = SharedStageClock()
    assert clock.run(0.0, 4.0, 2.0) == (0.0, 6.0)
    assert clock.free_s == 0.0
    # It begins at once: two seconds in the older one's pauses, two after its end.
    assert clock.run(0.0, 4.0, 2.0) == (6.0, 8.0)
    # The third has to wait for the first; from now on the stage computes without a pause.
    assert clock.free_s == 6.0
    assert clock.run(6.0, 4.0, 2.0) == (8.0, 12.0)
    assert clock.run(8.0, 4.0, 2.0) == (12.0, 16.0)


def test_pauses_before_the_younger_came_are_lost() -> None:
    clock = SharedStageClock()
    clock.run(0.0, 4.0, 2.0)
    # Half of the older step is left: two seconds to compute and one to wait.
    assert clock.run(3.0, 4.0, 2.0) == (6.0, 9.0)


def test_a_step_is_never_shorter_than_alone() -> None:
    clock = SharedStageClock()
    clock.run(0.0, 1.0, 0.0)
    assert clock.run(0.5, 2.0, 7.0) == (1.0, 9.5)


@pytest.mark.parametrize("seed", range(5))
def test_sharing_is_never_slower_and_never_computes_twice_at_a_time(seed: int) -> None:
    random = Random(seed)
    alone, shared = StageClock(), SharedStageClock()
    arrival_s = compute_s = 0.0
    last_end_s = 0.0
    for _ in range(200):
        arrival_s += random.choice((0.0, 1.0, 8.0))
        step = random.uniform(1.0, 4.0), random.choice((0.0, random.uniform(0.0, 4.0)))
        compute_s += step[0]
        _, end_s = shared.run(max(arrival_s, shared.free_s), *step)
        _, alone_end_s = alone.run(max(arrival_s, alone.free_s), *step)
        assert last_end_s <= end_s <= alone_end_s + 1e-9
        assert end_s >= compute_s
        last_end_s = end_s
