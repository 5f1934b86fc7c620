"""Measures the most memory that a command and all processes under it hold at once.

    python -m benchmark.house.peak_memory make test

Counts proportional set sizes, twice a second: a page that n processes share counts as 1/n for each.
Leaves with the command's exit code.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import psutil

INTERVAL_S = 0.5
NUM_SHOWN = 8
MIB = 1 << 20


class Holding(NamedTuple):
    """One process of a sample."""

    num_bytes: int
    command: str


def processes_under(pid: int) -> list[psutil.Process]:
    """The process and its descendants, as far as they live."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def sample(pid: int) -> list[Holding]:
    """The memory that each process under `pid` holds now, the largest first."""
    holdings = []
    for process in processes_under(pid):
        try:
            command = " ".join(process.cmdline())
            holdings.append(Holding(process.memory_full_info().pss, command))
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return sorted(holdings, reverse=True)


def held_bytes(holdings: Sequence[Holding]) -> int:
    """The sum of one sample."""
    return sum(holding.num_bytes for holding in holdings)


def report(peak: Sequence[Holding], at_s: float, took_s: float) -> str:
    """Describes the largest sample."""
    total = (
        f"peak {held_bytes(peak) / MIB:,.0f} MiB in {len(peak)} processes, {at_s:.0f} s after the "
        f"start of {took_s:.0f} s"
    )
    largest = (f"{one.num_bytes / MIB:8,.0f} MiB  {one.command[:100]}" for one in peak[:NUM_SHOWN])
    return "\n".join((total, *largest))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the command's exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="with its arguments")
    command = parser.parse_args(argv).command
    if not command:
        parser.error("name the command to run, as in: peak_memory make test")
    started_s = time.monotonic()
    peak: list[Holding] = []
    peak_s = 0.0
    with subprocess.Popen(command) as running:
        while running.poll() is None:
            holdings = sample(running.pid)
            if held_bytes(holdings) > held_bytes(peak):
                peak, peak_s = holdings, time.monotonic() - started_s
            time.sleep(INTERVAL_S)
    print(report(peak, peak_s, time.monotonic() - started_s))
    return running.returncode


if __name__ == "__main__":
    sys.exit(main())
