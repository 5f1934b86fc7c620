"""DynaPipe's formula on its own numbers, and splits that follow from it."""

import pytest

from sgl_pipeline.migration.delta_rule import (
    best_removal,
    delta_ms,
    even_split_less,
    without_last_layers,
)


@pytest.mark.parametrize(
    ("removed", "delta"), [(0, 3.09), (1, 1.09), (2, 0.09), (3, 0.91), (6, 4.91)]
)
def test_the_papers_example(removed: int, delta: float) -> None:
    """Sampling as long as 3.09 layers on four stages: two layers leave the last one. Six go to
    three stages, which get two each."""
    assert delta_ms(3.09, 1.0, removed, 4) == pytest.approx(delta)


def test_two_layers_leave_the_last_stage_in_the_papers_example() -> None:
    assert best_removal(3.09, 1.0, 4, most_removed=11) == 2
    assert best_removal(3.09 * 0.4, 0.4, 4, most_removed=11) == 2


@pytest.mark.parametrize(
    ("tail_ms", "most", "removed"),
    [(0.0, 5, 0), (0.9, 5, 0), (1.1, 5, 1), (9.0, 5, 5), (9.0, 1, 1)],
)
def test_more_layers_leave_for_longer_sampling(tail_ms: float, most: int, removed: int) -> None:
    assert best_removal(tail_ms, 1.0, 4, most) == removed


@pytest.mark.parametrize(
    ("removed", "split"),
    [(0, (12, 12, 12, 12)), (1, (12, 12, 13, 11)), (3, (13, 13, 13, 9)), (4, (13, 13, 14, 8))],
)
def test_removed_layers_are_spread_evenly_upstream(removed: int, split: tuple[int, ...]) -> None:
    assert even_split_less(48, 4, removed) == split


def test_the_stage_with_the_fewest_gets_the_next_layer() -> None:
    assert without_last_layers((5, 4, 4, 3), 1) == (5, 4, 5, 2)
    assert without_last_layers((5, 4, 4, 3), 2) == (5, 5, 5, 1)


def test_the_last_stage_keeps_a_layer() -> None:
    with pytest.raises(AssertionError):
        without_last_layers((4, 4), 4)
