"""What could go wrong in random schedules, and how often it has to for them to be worth running."""

from collections import Counter
from collections.abc import Mapping

from fault_schedules.room_errors import REJECTED

# Fewer seeds than these may lack what is rare.
FEWEST_SEEDS = 250
# Those of `make test`. What is rarest happens in as many of these as in the first 250.
TESTED_SEEDS = range(70, 200)
# Of each world, the least that happens for each seed.
LEAST: Mapping[str, Mapping[str, float]] = {
    "server": {
        "num_steps": 50,
        "num_retractions": 1,
        "num_aborts": 2,
        "num_moves": 0.25,
        "num_abandoned_moves": 0.1,
        "num_lost_workers": 1,
        "num_recoveries": 0.5,
        "num_replayed_tokens": 5,
        "num_refusals": 0.2,
        "num_shrunk": 0.04,
        "num_grown": 0.02,
        "num_leaves": 0.5,
        "num_handovers": 0.25,
        "has_tier": 0.27,
        # At all.
        "num_unfit": 0.001,
        "has_given_up": 0.001,
        "num_full_links": 0.001,
    },
    "disaggregated": {
        "clean": 0.1,
        "patient": 0.25,
        "steps": 10,
        "pages": 10,
        "transferred": 3,
        "bootstrap_failed": 2,
        "transfer_failed": 0.4,
        "computed_here": 0.15,
        "failed_loads": 0.15,
        "moves": 1,
        "recoveries": 0.4,
        "handovers": 0.15,
        "lost_workers": 1.5,
        "deaths": 0.2,
        "breaks": 0.4,
        "retractions": 0.1,
        "stores": 0.2,
        "offloaded": 0.25,
        "accepted_drafts": 0.25,
        "wrong_drafts": 0.25,
        "ended_early": 0.08,
        REJECTED: 0.01,
    },
}
# Of the world of one server, the least for each seed that has a store beyond the pool.
LEAST_WITH_A_STORE: Mapping[str, float] = {
    "num_saved_tokens": 30,
    "num_loaded_tokens": 6,
    "num_broken_pages": 0.1,
    "num_moves_in_transfers": 0.025,
    "num_lost_transfers": 0.1,
    "num_evicted_reads": 0.03,
    "num_cut_due_nodes": 0.1,
    "num_owed_tokens": 0.02,
}


def too_rare(counts: Counter[str], num_seeds: int, least: Mapping[str, float]) -> list[str]:
    """Of `counts` over so many seeds, what happened less often than `least` has it, in words."""
    return [
        f"{name}: {counts[name]}, at least {share * num_seeds:g} wanted"
        for name, share in least.items()
        if counts[name] < share * num_seeds
    ]


def too_rare_in(world: str, counts: Counter[str], num_seeds: int) -> list[str]:
    """`too_rare` of all that has to happen in a world."""
    found = too_rare(counts, num_seeds, LEAST[world])
    if world == "server":
        found += too_rare(counts, counts["has_tier"], LEAST_WITH_A_STORE)
    return found
