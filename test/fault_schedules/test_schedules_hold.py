"""Random schedules hold, replay bit for bit, and have what could go wrong: those with a store
beyond the pool, and those of models with states, among them."""

from collections import Counter
from collections.abc import Iterable
from functools import cache

import pytest
from fault_schedules.outcome import Outcome
from fault_schedules.rare_events import (
    LEAST_WITH_A_STORE,
    TESTED_SEEDS,
    too_rare,
    too_rare_in,
)
from fault_schedules.world import has_tier, run_seed, slots_of


@cache
def outcome_of(seed: int) -> Outcome:
    """The outcome of a schedule, which does not fail. Several tests ask for the same."""
    return run_seed(seed)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """Those of `TESTED_SEEDS`."""
    return [outcome_of(seed) for seed in TESTED_SEEDS]


def counts_of(outcomes: Iterable[Outcome]) -> Counter[str]:
    """The sums of all counts."""
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts += outcome.counts
    return counts


def total(outcomes: Iterable[Outcome], name: str) -> int:
    """The sum of the attribute `name`."""
    return sum(getattr(outcome, name) for outcome in outcomes)


@pytest.mark.slow
def test_schedules_hold_and_have_what_could_go_wrong(outcomes: list[Outcome]) -> None:
    assert too_rare_in("server", counts_of(outcomes), len(TESTED_SEEDS)) == []
    assert total(outcomes, "has_given_up") < len(TESTED_SEEDS) // 4


@pytest.mark.slow
def test_schedules_with_a_store_have_what_could_go_wrong(outcomes: list[Outcome]) -> None:
    seeds = [seed for seed in TESTED_SEEDS if has_tier(seed)]
    assert 0.3 < len(seeds) / len(TESTED_SEEDS) < 0.37
    ran = [outcome for outcome in outcomes if has_tier(outcome.seed) and outcome.has_tier]
    assert len(ran) > 9 * len(seeds) // 10
    assert too_rare(counts_of(ran), len(seeds), LEAST_WITH_A_STORE) == []
    # More often than in others.
    assert total(ran, "num_loaded_tokens") > 8 * len(seeds)
    assert total(ran, "num_evicted_reads") > len(seeds) // 10
    assert total(ran, "num_owed_tokens") > len(seeds) // 10
    assert sum(outcome.num_loaded_tokens > 0 for outcome in ran) > len(seeds) // 5


def test_schedules_with_states_have_what_could_go_wrong() -> None:
    ran = [outcome_of(seed) for seed in TESTED_SEEDS if slots_of(seed)]
    assert {slots_of(outcome.seed) for outcome in ran} == {1, 3, 8}
    assert total(ran, "num_retractions") > len(ran)
    assert total(ran, "num_aborts") > len(ran)
    assert total(ran, "num_recoveries") > len(ran) // 2
    assert total(ran, "num_handovers") > len(ran) // 10
    assert total(ran, "num_shrunk") > 0
    assert total(ran, "num_moves") > len(ran) // 10
    assert total(ran, "num_full_links") > len(ran) // 10
    assert not total(ran, "num_replayed_tokens")


def test_a_seed_replays_bit_for_bit() -> None:
    ran = [outcome_of(seed) for seed in TESTED_SEEDS[:10]]
    assert [run_seed(seed) for seed in TESTED_SEEDS[:10]] == ran
    assert len({outcome.digest for outcome in ran}) == 10
