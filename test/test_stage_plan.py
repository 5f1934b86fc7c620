"""Every layer belongs to exactly one stage, and a partition that does not fit is named."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.stage_plan import (
    StageCosts,
    StagePlan,
    agreed_costs,
    balanced_layer_counts,
    even_layer_counts,
    parse_layer_partition,
    stage_times_ms,
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


@st.composite
def stage_costs(draw: st.DrawFn) -> tuple[StageCosts, ...]:
    """Of one to four workers, of which some are slow, and a model with layers of two kinds."""
    num_stages = draw(st.integers(1, 4))
    num_layers = draw(st.integers(num_stages, 11))
    is_sparse = draw(st.lists(st.booleans(), min_size=num_layers, max_size=num_layers))
    sparse_ms = draw(st.sampled_from([0.3, 1.0, 2.7]))
    costs = StageCosts(
        tuple(sparse_ms if sparse else 1.0 for sparse in is_sparse),
        draw(st.floats(0, 1)),
        draw(st.floats(0, 12)),
    )
    return tuple(
        costs.scaled(draw(st.sampled_from([1.0, 1.0, 1.7, 3.0]))) for _ in range(num_stages)
    )


@given(stage_costs())
def test_no_other_split_is_faster_nor_as_fast_and_more_even(costs: tuple[StageCosts, ...]) -> None:
    num_layers = len(costs[0].layers_ms)
    counts = balanced_layer_counts(costs)
    assert_every_layer_once(StagePlan(0, counts), num_layers)

    def key(split: Sequence[int]) -> tuple[float, float]:
        times_ms = stage_times_ms(costs, split)
        return max(times_ms), sum(stage_ms**2 for stage_ms in times_ms)

    splits = [
        [end - start for start, end in pairwise((0, *cuts, num_layers))]
        for cuts in combinations(range(1, num_layers), len(costs) - 1)
    ]
    assert key(counts) == pytest.approx(min(map(key, splits)), rel=1e-6)


def equal_workers(
    num_layers: int, num_stages: int, head_ms: float, embedding_ms: float = 0.0
) -> list[StageCosts]:
    return [StageCosts((1.0,) * num_layers, embedding_ms, head_ms)] * num_stages


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    assert balanced_layer_counts(equal_workers(16, 4, head_ms=2.9)) == (5, 5, 4, 2)
    assert balanced_layer_counts(equal_workers(16, 4, head_ms=0.0)) == (4, 4, 4, 4)
    assert balanced_layer_counts(equal_workers(16, 4, head_ms=99.0)) == (5, 5, 5, 1)


def test_a_split_into_equal_stages_leaves_the_smaller_ones_at_the_ends() -> None:
    assert balanced_layer_counts(equal_workers(10, 3, head_ms=0.5, embedding_ms=0.1)) == (3, 4, 3)


def test_a_slow_worker_gets_fewer_layers() -> None:
    fast, slow = StageCosts((1.0,) * 12, 0.1, 0.1), StageCosts((2.0,) * 12, 0.2, 0.2)
    assert balanced_layer_counts([fast, slow, fast]) == (5, 2, 5)


def test_times_of_stages_add_up_embedding_layers_and_head() -> None:
    costs = [StageCosts((1.0, 2.0, 4.0), 0.5, 8.0), StageCosts((3.0, 6.0, 12.0), 1.5, 24.0)]
    assert stage_times_ms(costs, (1, 2)) == (1.5, 6.0 + 12.0 + 24.0)
    assert stage_times_ms(costs[:1], (3,)) == (0.5 + 7.0 + 8.0,)


def test_noise_makes_no_worker_slow_and_a_slow_core_does() -> None:
    noisy = [StageCosts((ms, ms), 0.1 * ms, 5 * head) for ms, head in ((1, 1), (1.1, 3), (0.9, 1))]
    assert agreed_costs(noisy, are_alike=False) == (StageCosts((1, 1), 0.1, 5),) * 3
    slow = [StageCosts((ms, ms), 0.1, 5) for ms in (1.0, 1.0, 1.5)]
    costs = agreed_costs(slow, are_alike=False)
    assert costs[2] == StageCosts((1.5, 1.5), pytest.approx(0.15), 7.5)
    assert costs[0] == slow[0]


def test_a_core_that_is_slow_for_a_moment_gets_no_fewer_layers() -> None:
    slow = [StageCosts((ms,) * 16, 0.0, 2 * ms) for ms in (2.0, 1.0)]
    assert balanced_layer_counts(agreed_costs(slow, are_alike=False)) == (6, 10)
    assert balanced_layer_counts(agreed_costs(slow, are_alike=True)) == (9, 7)


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
