"""Random schedules hold, replay bit for bit, and have what could go wrong: those with a store
beyond the pool, and those of models with states, among them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import count, islice

import pytest
from fault_schedules.outcome import Outcome
from fault_schedules.rare_events import (
    FEWEST_SEEDS,
    LEAST_WITH_A_STORE,
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
    """The outcomes of all seeds."""
    return [outcome_of(seed) for seed in range(FEWEST_SEEDS)]


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
    assert too_rare_in("server", counts_of(outcomes), FEWEST_SEEDS) == []
    assert total(outcomes, "has_given_up") < FEWEST_SEEDS // 4


@pytest.mark.slow
def test_schedules_with_a_store_have_what_could_go_wrong(outcomes: list[Outcome]) -> None:
    seeds = [seed for seed in range(FEWEST_SEEDS) if has_tier(seed)]
    assert 0.3 < len(seeds) / FEWEST_SEEDS < 0.37
    ran = [outcomes[seed] for seed in seeds if outcomes[seed].has_tier]
    assert len(ran) > 9 * len(seeds) // 10
    assert too_rare(counts_of(ran), len(seeds), LEAST_WITH_A_STORE) == []
    # More often than in others.
    assert total(ran, "num_loaded_tokens") > 8 * len(seeds)
    assert total(ran, "num_evicted_reads") > len(seeds) // 10
    assert total(ran, "num_owed_tokens") > len(seeds) // 10
    assert sum(outcome.num_loaded_tokens > 0 for outcome in ran) > len(seeds) // 5


@pytest.mark.slow
def test_schedules_with_states_have_what_could_go_wrong(outcomes: list[Outcome]) -> None:
    seeds = [seed for seed in range(FEWEST_SEEDS) if slots_of(seed)]
    check_states([outcomes[seed] for seed in seeds])


def test_a_few_schedules_with_states_have_what_could_go_wrong() -> None:
    check_states([outcome_of(seed) for seed in islice(filter(slots_of, count()), 60)])


def check_states(ran: Sequence[Outcome]) -> None:
    """All of them are of models with states."""
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
    ran = [outcome_of(seed) for seed in range(20)]
    assert [run_seed(seed) for seed in range(20)] == ran
    assert len({outcome.digest for outcome in ran}) == 20
