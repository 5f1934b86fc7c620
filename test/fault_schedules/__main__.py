"""Runs the pipeline core through many random schedules; a seed that fails is printed and replays.

    make fault-schedules SEEDS=100000
    make fault-schedules SEEDS=1 FIRST=1234     # one seed again, bit for bit
    make fault-schedules WORLD=disaggregated    # prefill and decode apart

Needs no model, no sockets and no clock. Exits with 1 when a seed failed, or when in
`FEWEST_SEEDS` or more of them something that could go wrong hardly did.
"""

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from fault_schedules.disaggregated_world import run_disaggregated_seed
from fault_schedules.rare_events import FEWEST_SEEDS, too_rare_in
from fault_schedules.world import run_seed

_SEEDS_A_TASK = 50
_PROGRESS_S = 5.0
# What a seed is run by, and what is said of all of them.
_WORLDS: dict[str, tuple[Callable[[int], Counter[str]], str]] = {
    "server": (
        lambda seed: run_seed(seed).counts,
        "{num_steps} steps, {num_retractions} retractions, {num_aborts} requests that ended early, "
        "{num_moves} layer moves and {num_abandoned_moves} that were abandoned, "
        "{num_lost_workers} lost workers and {num_recoveries} recoveries, {num_shrunk} to fewer "
        "stages and {num_grown} to more, {num_leaves} workers asked to leave and {num_handovers} "
        "handovers, with {num_replayed_tokens} tokens computed again by a stage alone, {has_tier} "
        "seeds with a store, {num_saved_tokens} tokens saved and {num_loaded_tokens} loaded, "
        "{num_broken_pages} broken pages, {num_moves_in_transfers} moves and {num_lost_transfers} "
        "transfers cut off",
    ),
    "disaggregated": (
        lambda seed: run_disaggregated_seed(seed).counts,
        "{steps} steps, {retractions} retractions, {halves} halves of requests, {aborts} of which "
        "ended early, {transferred} ends of rooms that were read, {bootstrap_failed} that failed "
        "before and {transfer_failed} in the transfer, {computed_here} prompts computed by the "
        "decode server, {pages} pages read and {failed_loads} loads that fell short, {moves} layer "
        "moves, {lost_workers} lost workers, {recoveries} recoveries and {handovers} handovers, "
        "{deaths} dead servers and {breaks} broken streams, {stores} servers with a store, "
        "{offloaded} requests with a lease, {ended_early} of which lost it before their end",
    ),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fault_schedules", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--world", choices=[*_WORLDS], default="server")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(argv)
    seeds = range(options.first, options.first + options.seeds)
    _, sentence = _WORLDS[options.world]
    totals: Counter[str] = Counter()
    failed: list[int] = []
    done = 0
    started_s = shown_s = time.monotonic()
    for seed, result in _results(options.world, seeds, options.processes):
        done += 1
        if isinstance(result, Counter):
            totals += result
        else:
            failed.append(seed)
            again = f"make fault-schedules WORLD={options.world} SEEDS=1 FIRST={seed}"
            print(f"seed {seed} failed, again: {again}\n{result}", flush=True)
        now_s = time.monotonic()
        if now_s - shown_s >= _PROGRESS_S:
            shown_s = now_s
            left_s = (now_s - started_s) / done * (len(seeds) - done)
            print(f"{done} of {len(seeds)} seeds, {left_s:.0f} s left", flush=True)
    print(
        f"{done} seeds in {time.monotonic() - started_s:.0f} s: {sentence.format_map(totals)}, "
        f"{len(failed)} seeds failed {failed[:20]}"
    )
    rare = too_rare_in(options.world, totals, done) if done >= FEWEST_SEEDS else []
    for line in rare:
        print(f"too rare: {line}")
    return 1 if failed or rare else 0


def _results(
    world: str, seeds: range, num_processes: int
) -> Iterator[tuple[int, Counter[str] | str]]:
    """Each seed's counts, or the traceback of its failure."""
    parts = [seeds[start : start + _SEEDS_A_TASK] for start in range(0, len(seeds), _SEEDS_A_TASK)]
    if num_processes == 1 or len(parts) == 1:
        for part in parts:
            yield from _run(world, part)
        return
    with ProcessPoolExecutor(num_processes) as pool:
        for results in pool.map(partial(_run, world), parts):
            yield from results


def _run(world: str, seeds: Iterable[int]) -> list[tuple[int, Counter[str] | str]]:
    run, _ = _WORLDS[world]
    results: list[tuple[int, Counter[str] | str]] = []
    for seed in seeds:
        try:
            results.append((seed, run(seed)))
        except Exception:
            results.append((seed, traceback.format_exc()))
    return results


if __name__ == "__main__":
    sys.exit(main())
