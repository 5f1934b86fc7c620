"""The search against every split there is, with random costs and limits."""

import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.splits import all_splits

from sgl_pipeline.migration.split_search import (
    SLACK,
    SplitSearch,
    StageTerms,
    can_stay_below,
)


def layers_of(split: tuple[int, ...], stage: int) -> set[int]:
    start = sum(split[:stage])
    return set(range(start, start + split[stage]))


class Case:
    """Random costs and limits of few layers on few stages."""

    def __init__(self, seed: int, has_limits: bool) -> None:
        rng = random.Random(seed)
        self.num_stages = rng.randint(1, 4)
        self.num_layers = rng.randint(self.num_stages, 9)
        self.weights = [rng.choice([1.0, 1.0, 1.0, 2.5, 0.3]) for _ in range(self.num_layers)]
        self.layer_ms = rng.uniform(0.1, 2.0)
        self.stages = [
            StageTerms(rng.choice([1.0, 1.0, rng.uniform(0.5, 3.0)]), rng.choice([0.0, 1.0, 4.0]))
            for _ in range(self.num_stages)
        ]
        splits = list(all_splits(self.num_layers, self.num_stages))
        self.current = rng.choice(splits)
        self.max_layers = (
            tuple(count + rng.randint(-1, 3) for count in self.current) if has_limits else None
        )
        self.splits = [split for split in splits if self.may_follow(split)]

    @property
    def ends_ms(self) -> list[float]:
        return [0.0, *accumulate(weight * self.layer_ms for weight in self.weights)]

    def may_follow(self, split: tuple[int, ...]) -> bool:
        """Whether no stage holds too much while both splits are there."""
        return self.max_layers is None or all(
            len(layers_of(self.current, stage) | layers_of(split, stage)) <= most
            for stage, most in enumerate(self.max_layers)
        )

    def slowest_ms(self, split: tuple[int, ...]) -> float:
        return max(
            term.speed
            * (self.layer_ms * sum(self.weights[layer] for layer in layers_of(split, s)) + extra)
            for s, term in enumerate(self.stages)
            for extra in [term.extra_ms]
        )

    def moved(self, split: tuple[int, ...]) -> int:
        return sum(
            len(layers_of(split, stage) - layers_of(self.current, stage))
            for stage in range(self.num_stages)
        )


@given(st.integers(0, 2**32), st.booleans())
def test_no_allowed_split_is_better(seed: int, has_limits: bool) -> None:
    case = Case(seed, has_limits)
    search = SplitSearch(case.current, case.max_layers)
    found = search.best(case.ends_ms, case.stages)
    if not case.splits:
        assert found is None
        return
    assert found is not None
    assert case.may_follow(found)
    assert sum(found) == case.num_layers
    assert min(found) >= 1
    best_ms = min(map(case.slowest_ms, case.splits))
    assert case.slowest_ms(found) <= best_ms * (1.0 + SLACK) * (1.0 + 1e-9)
    as_good = [
        split
        for split in case.splits
        if case.slowest_ms(split) <= best_ms * (1.0 + SLACK) * (1.0 - 1e-9)
    ]
    assert case.moved(found) <= min(map(case.moved, as_good), default=99)


@given(st.integers(0, 2**32))
def test_what_is_allowed_follows_from_sets_of_layers(seed: int) -> None:
    case = Case(seed, has_limits=True)
    search = SplitSearch(case.current, case.max_layers)
    for split in all_splits(case.num_layers, case.num_stages):
        assert search.is_allowed(split) == case.may_follow(split)


@given(st.integers(0, 2**32), st.floats(0.7, 1.3), st.booleans())
def test_the_quick_look_misses_no_split(seed: int, share: float, is_uniform: bool) -> None:
    case = Case(seed, has_limits=False)
    if is_uniform:
        case.weights = [1.0] * case.num_layers
    if abs(share - 1.0) < 1e-6:
        return
    limit_ms = share * min(map(case.slowest_ms, case.splits))
    found = can_stay_below(limit_ms, case.ends_ms, case.stages)
    if share > 1.0 or is_uniform:
        assert found == (share > 1.0)


def test_of_splits_as_good_the_nearest_is_taken() -> None:
    # One stage has 3 of 6 layers, which is as good as any split while the first has a heavy part.
    stages = [StageTerms(1.0, 10.0), StageTerms(1.0, 0.0), StageTerms(1.0, 0.0)]
    search = SplitSearch((1, 5, 1))
    assert search.best(range(8), stages) == (1, 5, 1)
    assert SplitSearch((2, 4, 1)).best(range(8), stages) == (1, 5, 1)


@pytest.mark.parametrize(
    ("max_layers", "expected"),
    [
        (None, (7, 7, 2)),
        ((6, 8, 8), (5, 8, 3)),
        ((6, 7, 8), (5, 7, 4)),
        ((6, 6, 8), (5, 6, 5)),
        ((5, 6, 5), (5, 6, 5)),
        ((5, 6, 4), None),
    ],
)
def test_limits_hold_old_and_new_layers_together(
    max_layers: tuple[int, ...] | None, expected: tuple[int, ...] | None
) -> None:
    """From (5, 6, 5) with a head of five layers: the middle gives its first layers to the first
    stage and gets some of the last one's, all of which it holds for a moment."""
    stages = [StageTerms(1.0, 0.0), StageTerms(1.0, 0.0), StageTerms(1.0, 5.0)]
    assert SplitSearch((5, 6, 5), max_layers).best(range(17), stages) == expected
