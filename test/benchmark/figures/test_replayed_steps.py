"""Replays of equal steps idle as the window, the split and the links say."""

import pytest

from benchmark.figures.replayed_steps import StepParts, best_split, floor, idle_share, two_ranges

STEPS = [StepParts(1.0, 0.0, 0.0, 0.0)] * 500


@pytest.mark.parametrize(
    ("layer_counts", "window", "expected"),
    [
        ((1, 1), 2, 0.0),
        ((1, 1), 1, 0.5),
        ((1, 3), 2, 1 / 3),
        ((1, 1, 1, 1), 2, 0.0),
        ((1, 1, 1, 1), 1, 0.5),
        # The worker of six layers is the slowest, whatever range they are in.
        ((1, 3, 1, 3), 4, 1 / 3),
    ],
)
def test_two_workers_idle_as_window_and_split_say(
    layer_counts: tuple[int, ...], window: int, expected: float
) -> None:
    assert idle_share(STEPS, layer_counts, 2, window) == pytest.approx(expected, abs=0.01)


def test_a_link_costs_each_range_a_way_unless_more_steps_are_in_flight() -> None:
    steps = [StepParts(1.0, 0.0, 0.0, 0.5)] * 500
    # A step takes four seconds of work and half a second, or three halves, on the way.
    assert idle_share(steps, (2, 2), 2, 2) == pytest.approx(0.5 / 4.5, abs=0.01)
    assert idle_share(steps, (1, 1, 1, 1), 2, 2) == pytest.approx(1.5 / 5.5, abs=0.01)
    assert idle_share(steps, (1, 1, 1, 1), 2, 4) == pytest.approx(0.0, abs=0.01)


def test_steps_that_differ_idle_until_others_are_there_to_fill_in() -> None:
    steps = [StepParts(seconds, 0.0, 0.0, 0.0) for seconds in (1.0, 9.0) * 250]
    few, more = (idle_share(steps, (1, 1), 2, window) for window in (2, 4))
    assert few == pytest.approx(8 / 18, abs=0.01) and more < few


def test_the_ends_are_of_the_first_and_the_last_range() -> None:
    steps = [StepParts(1.0, 1.0, 2.0, 0.0)] * 500
    # 2 + 1 and 2 + 2 seconds.
    assert idle_share(steps, (1, 1, 1, 1), 2, 8) == pytest.approx(1 / 8, abs=0.01)


def test_ranges_keep_a_workers_layers_together_and_halves_lower_the_floor() -> None:
    assert two_ranges((3, 4)) == (1, 2, 2, 2)
    assert best_split(STEPS, 3, 2, cuts=1) in ((1.0, 2.0), (2.0, 1.0))
    assert floor(STEPS, (1, 2)) == pytest.approx(0.25)
    assert best_split(STEPS, 3, 2, cuts=2) == (1.5, 1.5)
    assert floor(STEPS, (1.5, 1.5)) == pytest.approx(0.0)


def test_the_ends_make_a_stage_the_slowest() -> None:
    steps = [StepParts(1.0, 1.0, 4.0, 0.0)] * 500
    assert best_split(steps, 7, 2, cuts=1) == (5.0, 2.0)
    assert floor(steps, (5, 2)) == pytest.approx(0.0)
    assert floor(steps, (4, 3)) == pytest.approx(1 / 7)
