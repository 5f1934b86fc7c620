"""Splits without measurement: even ones, written ones, and those that do not fit and are named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.layer_partition import even_layer_counts, parse_layer_partition
from sgl_pipeline.stage_plan import StagePlan

sizes = st.integers(1, 12).flatmap(
    lambda num_stages: st.tuples(st.integers(num_stages, 100), st.just(num_stages))
)


@given(sizes)
def test_an_even_split_has_every_layer_and_differs_by_one(size: tuple[int, int]) -> None:
    num_layers, num_stages = size
    counts = even_layer_counts(num_layers, num_stages)
    assert (len(counts), sum(counts)) == (num_stages, num_layers)
    assert min(counts) >= 1
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


@pytest.mark.parametrize(("num_stages", "counts"), [(1, (3,)), (2, None), (3, (1, 1, 1))])
def test_auto_asks_for_times_only_where_there_is_a_choice(
    num_stages: int, counts: tuple[int, ...] | None
) -> None:
    expected = counts and StagePlan(0, counts)
    assert parse_layer_partition("auto", num_stages, 3) == expected


def test_a_written_partition_is_taken_as_it_is() -> None:
    assert parse_layer_partition("7,5,3,1", 4, 16) == StagePlan(0, (7, 5, 3, 1))


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
        parse_layer_partition(text, num_stages, 16)
