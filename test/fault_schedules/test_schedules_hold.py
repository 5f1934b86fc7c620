"""Random schedules hold, replay bit for bit, and have what could go wrong: those with a store
beyond the pool, and those of models with states, among them."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import count, islice

import pytest
from fault_schedules.outcome import Outcome
from fault_schedules.world import has_tier, run_seed, slots_of

# CI runs those from here to a thousand by `make fault-schedules`.
NUM_SEEDS = 250


@cache
def outcome_of(seed: int) -> Outcome:
    """The outcome of a schedule, which does not fail. Several tests ask for the same."""
    return run_seed(seed)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """The outcomes of all seeds."""
    return [outcome_of(seed) for seed in range(NUM_SEEDS)]


def total(outcomes: Iterable[Outcome], name: str) -> int:
    """The sum of the attribute `name`."""
    return sum(getattr(outcome, name) for outcome in outcomes)


@pytest.mark.slow
def test_schedules_hold_and_have_what_could_go_wrong(outcomes: list[Outcome]) -> None:
    assert total(outcomes, "num_steps") > 50 * NUM_SEEDS
    assert total(outcomes, "num_retractions") > NUM_SEEDS
    assert total(outcomes, "num_aborts") > 2 * NUM_SEEDS
    assert total(outcomes, "num_moves") > NUM_SEEDS // 4
    assert total(outcomes, "num_abandoned_moves") > NUM_SEEDS // 10
    assert total(outcomes, "num_lost_workers") > NUM_SEEDS
    assert total(outcomes, "num_recoveries") > NUM_SEEDS // 2
    assert total(outcomes, "num_replayed_tokens") > 5 * NUM_SEEDS
    assert total(outcomes, "num_refusals") > NUM_SEEDS // 5
    assert total(outcomes, "num_shrunk") > NUM_SEEDS // 25
    assert total(outcomes, "num_grown") > NUM_SEEDS // 50
    assert total(outcomes, "num_leaves") > NUM_SEEDS // 2
    assert total(outcomes, "num_handovers") > NUM_SEEDS // 4
    assert total(outcomes, "num_unfit") > 0
    assert 0 < total(outcomes, "has_given_up") < NUM_SEEDS // 4


@pytest.mark.slow
def test_schedules_with_a_store_have_what_could_go_wrong(outcomes: list[Outcome]) -> None:
    seeds = [seed for seed in range(NUM_SEEDS) if has_tier(seed)]
    assert 0.3 < len(seeds) / NUM_SEEDS < 0.37
    ran = [outcomes[seed] for seed in seeds if outcomes[seed].has_tier]
    assert len(ran) > 9 * len(seeds) // 10
    assert total(ran, "num_saved_tokens") > 30 * len(seeds)
    assert total(ran, "num_loaded_tokens") > 8 * len(seeds)
    assert sum(outcome.num_loaded_tokens > 0 for outcome in ran) > len(seeds) // 5
    assert total(ran, "num_broken_pages") > len(seeds) // 10
    assert total(ran, "num_moves_in_transfers") > len(seeds) // 40
    assert total(ran, "num_lost_transfers") > len(seeds) // 10
    assert total(ran, "num_evicted_reads") > len(seeds) // 10
    assert total(ran, "num_cut_due_nodes") > len(seeds) // 10
    assert total(ran, "num_owed_tokens") > len(seeds) // 10


@pytest.mark.slow
def test_schedules_with_states_have_what_could_go_wrong(outcomes: list[Outcome]) -> None:
    seeds = [seed for seed in range(NUM_SEEDS) if slots_of(seed)]
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
