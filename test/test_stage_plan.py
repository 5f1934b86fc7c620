"""Every layer belongs to exactly one stage, and a partition that does not fit is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.stage_plan import (
    StagePlan,
    auto_layer_counts,
    even_layer_counts,
    parse_layer_partition,
)

sizes = st.integers(1, 12).flatmap(
    lambda num_stages: st.tuples(st.integers(num_stages, 100), st.just(num_stages))
)


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


@given(sizes, st.floats(0, 20))
def test_no_other_split_is_cheaper_for_decode_and_prefill_together_than_auto(
    size: tuple[int, int], head_layers: float
) -> None:
    num_layers, num_stages = size
    counts = auto_layer_counts(num_layers, num_stages, head_layers)
    assert_every_layer_once(StagePlan(0, counts), num_layers)

    def cost(upstream: int, last: int) -> float:
        return max(upstream, last + head_layers) + max(upstream, last)

    if num_stages > 1:
        others = [
            cost(-(-(num_layers - last) // (num_stages - 1)), last)
            for last in range(1, num_layers - num_stages + 2)
        ]
        assert cost(max(counts[:-1]), counts[-1]) == min(others)


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    assert auto_layer_counts(16, 4, head_layers=3.0) == (5, 5, 4, 2)
    assert auto_layer_counts(16, 4, head_layers=0.0) == (4, 4, 4, 4)


def test_a_split_that_prefill_would_pay_for_as_much_stays_even() -> None:
    assert auto_layer_counts(16, 2, head_layers=2.6) == (8, 8)


def test_a_written_partition_is_taken_as_it_is() -> None:
    assert parse_layer_partition("7,5,3,1", 16, 4, 0.0) == StagePlan(0, (7, 5, 3, 1))


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
        parse_layer_partition(text, 16, num_stages, 0.0)
