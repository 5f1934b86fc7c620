"""The planned split against every other split, and what heavy heads and slow workers do to it."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_pipeline.costs.stage_costs import PartSizes, StageCosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.migration.cost_model import agreed_costs, stage_times_ms
from sgl_pipeline.migration.partition import balanced_layer_counts, fits_in


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
    assert sum(counts) == num_layers
    assert min(counts) >= 1

    def key(split: Sequence[int]) -> tuple[float, float]:
        times_ms = stage_times_ms(costs, split)
        # Sums of the same fractions in another order are as fast.
        return round(max(times_ms), 9), sum(stage_ms**2 for stage_ms in times_ms)

    splits = [
        [end - start for start, end in pairwise((0, *cuts, num_layers))]
        for cuts in combinations(range(1, num_layers), len(costs) - 1)
    ]
    assert key(counts) == pytest.approx(min(map(key, splits)), rel=1e-6)


@given(stage_costs(), st.lists(st.integers(0, 30), min_size=4, max_size=4), st.integers(0, 3))
def test_no_other_split_that_fits_is_faster(
    costs: tuple[StageCosts, ...], memory_bytes: list[int], num_tokens: int
) -> None:
    """A layer takes 2 bytes and a page 1 more in each, the embedding 1 and the head 3."""
    num_layers, num_stages = len(costs[0].layers_ms), len(costs)
    sizes = PartSizes((2,) * num_layers, 1, 3, page_layer_bytes=1, page_size=2)
    pages = 2 if num_tokens == 3 else 1

    def fits(split: Sequence[int]) -> bool:
        needs = [(2 + pages) * count for count in split]
        needs[0] += 1
        needs[-1] += 3
        return all(need <= memory for need, memory in zip(needs, memory_bytes, strict=False))

    splits = [
        split
        for cuts in combinations(range(1, num_layers), num_stages - 1)
        if fits(split := [b - a for a, b in pairwise((0, *cuts, num_layers))])
    ]
    fit = fits_in(sizes, memory_bytes, num_tokens)
    if not splits:
        with pytest.raises(ConfigurationError, match="do not fit"):
            balanced_layer_counts(costs, fit)
        return
    counts = balanced_layer_counts(costs, fit)
    assert list(counts) in splits
    least_ms = min(max(stage_times_ms(costs, split)) for split in splits)
    assert max(stage_times_ms(costs, counts)) == pytest.approx(least_ms, rel=1e-6)


def equal_workers(
    num_layers: int, num_stages: int, head_ms: float, embedding_ms: float = 0.0
) -> list[StageCosts]:
    return [StageCosts((1.0,) * num_layers, embedding_ms, head_ms)] * num_stages


@pytest.mark.parametrize("have_states", [False, True])
def test_what_may_take_less_memory_is_named(have_states: bool) -> None:
    with pytest.raises(ConfigurationError) as refused:
        balanced_layer_counts(
            equal_workers(4, 2, head_ms=1.0), lambda *_: False, have_states=have_states
        )
    text = str(refused.value)
    assert "(--pp)" in text and "(--max-total-tokens)" in text
    assert ("(--max-mamba-cache-size)" in text) is have_states


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    assert balanced_layer_counts(equal_workers(16, 4, head_ms=2.9)) == (5, 5, 4, 2)
    assert balanced_layer_counts(equal_workers(16, 4, head_ms=0.0)) == (4, 4, 4, 4)
    assert balanced_layer_counts(equal_workers(16, 4, head_ms=99.0)) == (5, 5, 5, 1)


def test_a_split_into_equal_stages_leaves_the_smaller_ones_at_the_ends() -> None:
    assert balanced_layer_counts(equal_workers(10, 3, head_ms=0.5, embedding_ms=0.1)) == (3, 4, 3)


def test_a_slow_worker_gets_fewer_layers() -> None:
    fast, slow = StageCosts((1.0,) * 12, 0.1, 0.1), StageCosts((2.0,) * 12, 0.2, 0.2)
    assert balanced_layer_counts([fast, slow, fast]) == (5, 2, 5)


def test_a_core_that_is_slow_for_a_moment_gets_no_fewer_layers() -> None:
    slow = [StageCosts((ms,) * 16, 0.0, 2 * ms) for ms in (2.0, 1.0)]
    assert balanced_layer_counts(agreed_costs(slow, are_alike=False)) == (6, 10)
    assert balanced_layer_counts(agreed_costs(slow, are_alike=True)) == (9, 7)
