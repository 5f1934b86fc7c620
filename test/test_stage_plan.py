"""Every layer belongs to exactly one stage, and a partition that does not fit is named."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.stage_plan import (
    LayerCosts,
    StagePlan,
    auto_layer_counts,
    even_layer_counts,
    parse_layer_partition,
)

sizes = st.integers(1, 12).flatmap(
    lambda num_stages: st.tuples(st.integers(num_stages, 100), st.just(num_stages))
)
small_sizes = st.integers(1, 4).flatmap(
    lambda num_stages: st.tuples(st.integers(num_stages, 24), st.just(num_stages))
)


def equal_layers(num_layers: int, head: float) -> LayerCosts:
    return LayerCosts((1.0,) * num_layers, (1.0,) * num_layers, head)


def assert_every_layer_once(plan: StagePlan, num_layers: int) -> None:
    owned = [layer for stage in range(plan.num_stages) for layer in plan.layers_of(stage)]
    assert owned == list(range(num_layers))
    for stage in range(plan.num_stages):
        assert len(plan.layers_of(stage)) >= 1


@given(sizes)
def test_an_even_split_owns_every_layer_once_and_differs_by_one(size: tuple[int, int]) -> None:
    num_layers, num_stages = size
    counts = even_layer_counts(num_layers, num_stages)
    assert_every_layer_once(StagePlan(0, counts), num_layers)
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts"),
    [
        (61, 8, (7, 7, 8, 8, 8, 8, 8, 7)),
        (94, 8, (11, 12, 12, 12, 12, 12, 12, 11)),
        (10, 3, (3, 4, 3)),
        (16, 4, (4, 4, 4, 4)),
    ],
)
def test_splits_that_other_servers_got_wrong(
    num_layers: int, num_stages: int, counts: tuple[int, ...]
) -> None:
    assert even_layer_counts(num_layers, num_stages) == counts


@given(small_sizes, st.floats(0, 20))
def test_no_other_split_is_cheaper_for_decode_and_prefill_together_than_auto(
    size: tuple[int, int], head_layers: float
) -> None:
    num_layers, num_stages = size
    counts = auto_layer_counts(equal_layers(num_layers, head_layers), num_stages)
    assert_every_layer_once(StagePlan(0, counts), num_layers)

    def cost(upstream: int, last: int) -> float:
        return max(upstream, last + head_layers) + max(upstream, last)

    if num_stages > 1:
        others = [
            cost(-(-(num_layers - last) // (num_stages - 1)), last)
            for last in range(1, num_layers - num_stages + 2)
        ]
        assert cost(max(counts[:-1]), counts[-1]) == pytest.approx(min(others))


@given(small_sizes, st.floats(0, 5), st.data())
def test_layers_of_two_kinds_are_split_so_that_the_slowest_upstream_stage_is_fastest(
    size: tuple[int, int], head: float, data: st.DataObject
) -> None:
    num_layers, num_stages = size
    is_dense = data.draw(st.lists(st.booleans(), min_size=num_layers, max_size=num_layers))
    costs = LayerCosts(
        tuple(0.2 if dense else 1.3 for dense in is_dense),
        tuple(1.7 if dense else 0.8 for dense in is_dense),
        head,
    )
    counts = auto_layer_counts(costs, num_stages)
    assert_every_layer_once(StagePlan(0, counts), num_layers)
    *upstream, _ = counts
    assume(upstream)
    both = [sum(pair) for pair in zip(costs.decode, costs.prefill, strict=True)][: sum(upstream)]

    def slowest(lengths: Sequence[int]) -> float:
        layers = iter(both)
        return max(sum(next(layers) for _ in range(length)) for length in lengths)

    splits = (
        [end - start for start, end in pairwise((0, *cuts, len(both)))]
        for cuts in combinations(range(1, len(both)), len(upstream) - 1)
    )
    assert slowest(upstream) == pytest.approx(min(map(slowest, splits)))


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    assert auto_layer_counts(equal_layers(16, head=3.0), 4) == (5, 5, 4, 2)
    assert auto_layer_counts(equal_layers(16, head=0.0), 4) == (4, 4, 4, 4)


def test_a_split_that_prefill_would_pay_for_as_much_stays_even() -> None:
    assert auto_layer_counts(equal_layers(16, head=2.6), 2) == (8, 8)


def test_light_layers_are_spread_over_fewer_stages_than_heavy_ones() -> None:
    costs = LayerCosts.in_layers([1, 1, 1, 1, 4, 4], [1, 1, 1, 1, 4, 4], head=0)
    assert auto_layer_counts(costs, 3) == (4, 1, 1)


def test_costs_count_in_mean_layers() -> None:
    costs = LayerCosts.in_layers([10, 30], [3, 3], head=40)
    assert costs == LayerCosts((0.5, 1.5), (1.0, 1.0), 2.0)


def test_a_written_partition_is_taken_as_it_is() -> None:
    assert parse_layer_partition("7,5,3,1", 4, equal_layers(16, 0.0)) == StagePlan(0, (7, 5, 3, 1))


@pytest.mark.parametrize(
    ("text", "num_stages", "words"),
    [
        ("8,7", 2, "sums to 15, the model has 16"),
        ("8,8", 4, "names 2 stages, --pp asks for 4"),
        ("16,0", 2, "at least one layer"),
        ("8,x", 2, "auto, even or a list"),
        ("auto", 17, "--pp 17 is more than the model's 16 layers"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused_by_name(
    text: str, num_stages: int, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        parse_layer_partition(text, num_stages, equal_layers(16, 0.0))
