"""Runs the pipeline core through many random schedules; a seed that fails is printed and replays.

    make fault-schedules SEEDS=100000
    make fault-schedules SEEDS=1 FIRST=1234     # one seed again, bit for bit

Needs no model, no sockets and no clock. Exits with 1 when a seed failed.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from fault_schedules.outcome import Outcome
from fault_schedules.world import run_seed

_SEEDS_A_TASK = 50
_PROGRESS_S = 5.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fault_schedules", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=1_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(argv)
    seeds = range(options.first, options.first + options.seeds)
    steps = retractions = aborts = moves = abandoned = lost = recoveries = replayed = done = 0
    fewer = more = leaves = handovers = tiers = saved = loaded = broken = cut_off = 0
    failed: list[int] = []
    started_s = shown_s = time.monotonic()
    for seed, result in _results(seeds, options.processes):
        done += 1
        if isinstance(result, Outcome):
            steps += result.num_steps
            retractions += result.num_retractions
            aborts += result.num_aborts
            moves += result.num_moves
            abandoned += result.num_abandoned_moves
            lost += result.num_lost_workers
            recoveries += result.num_recoveries
            leaves += result.num_leaves
            handovers += result.num_handovers
            fewer += result.num_shrunk
            more += result.num_grown
            replayed += result.num_replayed_tokens
            tiers += result.has_tier
            saved += result.num_saved_tokens
            loaded += result.num_loaded_tokens
            broken += result.num_broken_pages
            cut_off += result.num_moves_in_transfers + result.num_lost_transfers
        else:
            failed.append(seed)
            print(f"seed {seed} failed:\n{result}", flush=True)
        now_s = time.monotonic()
        if now_s - shown_s >= _PROGRESS_S:
            shown_s = now_s
            left_s = (now_s - started_s) / done * (len(seeds) - done)
            print(f"{done} of {len(seeds)} seeds, {left_s:.0f} s left", flush=True)
    print(
        f"{done} seeds in {time.monotonic() - started_s:.0f} s: {steps} steps, {retractions} "
        f"retractions, {aborts} requests that ended early, {moves} layer moves and "
        f"{abandoned} that were abandoned, {lost} lost workers and {recoveries} recoveries, "
        f"{fewer} to fewer stages and {more} to more, {leaves} workers asked to leave and "
        f"{handovers} handovers, "
        f"with {replayed} tokens computed again by a stage alone, "
        f"{tiers} seeds with a store, {saved} tokens saved and {loaded} loaded, {broken} broken "
        f"pages and {cut_off} interrupts of transfers, "
        f"{len(failed)} seeds failed {failed[:20]}"
    )
    return 1 if failed else 0


def _results(seeds: range, num_processes: int) -> Iterator[tuple[int, Outcome | str]]:
    """Each seed's outcome, or the traceback of its failure."""
    parts = [seeds[start : start + _SEEDS_A_TASK] for start in range(0, len(seeds), _SEEDS_A_TASK)]
    if num_processes == 1 or len(parts) == 1:
        for part in parts:
            yield from _run(part)
        return
    with ProcessPoolExecutor(num_processes) as pool:
        for results in pool.map(_run, parts):
            yield from results


def _run(seeds: Iterable[int]) -> list[tuple[int, Outcome | str]]:
    results: list[tuple[int, Outcome | str]] = []
    for seed in seeds:
        try:
            results.append((seed, run_seed(seed)))
        except Exception:
            results.append((seed, traceback.format_exc()))
    return results


if __name__ == "__main__":
    sys.exit(main())
