"""Another user's process takes half of a stage's core for a minute: what layer moves win back.

    python -m benchmark.moves.busy_neighbor

Run by hand, some five minutes a round. Two servers take turns, one whose layers stay where they are
and one with `--migration auto`; both start with the split that the model's cost gives, under the
same closed loop of clients. The neighbor computes without end on the core of stage 0, so that the
kernel gives it half. Rates are of the time before it came, of its first and its last half minute,
and of the time after it left.
"""

import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product

from benchmark.moves.move_gains import Clients, ClosedLoop, current_split
from benchmark.support.command import Command, Options, Report, progress
from benchmark.support.dated_result import markdown_table
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import DEFAULT_PRESET, make_model
from benchmark.support.paths import SCRATCH

LOAD = ClosedLoop(clients=24, input_tokens=128, output_tokens=64)
# The first has to be fitted and settled: the planner knows no costs at the start.
SETTLE_S, HALF_S = 30.0, 30.0
MODES = ("off", "auto")
TIMES = ("before", "first half minute", "second half minute", "after")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Tokens a second, in and out, and the split at the end of that time."""

    round_number: int
    mode: str
    when: str
    tokens_per_s: float
    split: tuple[int, ...]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return Command(__spec__.name, __doc__, rounds=2, port=31900).run(_measure_all, argv)


def _measure_all(options: Options) -> Report:
    rates: list[Rate] = []
    with progress(options.rounds * len(MODES), "servers") as bar:
        for round_number, mode in product(range(options.rounds), MODES):
            rates += _measure(mode, round_number, options.port)
            bar.update()
    return Report(
        name="busy_neighbor",
        texts=[neighbor_table(rates)],
        facts={
            "model": {"preset": DEFAULT_PRESET, "stages": "2"},
            "load": {"clients": str(LOAD)},
            "figures": {"rates": f"tokens in and out a second, of {HALF_S:g} s each; medians"},
        },
        record={"rates": [asdict(one) for one in rates]},
    )


def _measure(mode: str, round_number: int, port: int) -> list[Rate]:
    flags = f"--migration {mode}" + (" --migration-spare-layers 6" if mode == "auto" else "")
    model = make_model(DEFAULT_PRESET)
    engine = parse_engine(f"ours --pp 2 {flags}", model, port, SCRATCH, usable_cores())
    rates: list[Rate] = []

    def note(when: str, settle_s: float) -> None:
        tokens_per_s = clients.rate(settle_s, HALF_S)
        split = current_split(engine.base_url)
        rates.append(
            Rate(
                round_number=round_number,
                mode=mode,
                when=when,
                tokens_per_s=tokens_per_s,
                split=split,
            )
        )
        print(
            f"round {round_number}, {mode}, {when}: {tokens_per_s:.0f} tok/s, {split}", flush=True
        )

    with running(engine, SCRATCH / "busy_neighbor.log"):
        clients = Clients(engine.base_url, LOAD)
        note("before", SETTLE_S)
        with neighbor_on(min(os.sched_getaffinity(0))):
            note("first half minute", 0.0)
            note("second half minute", 0.0)
        note("after", HALF_S / 2)
        clients.stop()
    return rates


@contextmanager
def neighbor_on(core: int) -> Iterator[None]:
    """A process that computes without end on that core."""
    process = multiprocessing.get_context("spawn").Process(target=_compute, args=(core,))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _compute(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        sum(range(100_000))


def neighbor_table(rates: Sequence[Rate]) -> str:
    """Markdown: medians over the rounds; shares are of the rate before the neighbor came."""
    rows = []
    for mode in dict.fromkeys(one.mode for one in rates):
        medians = {
            when: statistics.median(
                one.tokens_per_s for one in rates if (one.mode, one.when) == (mode, when)
            )
            for when in TIMES
        }
        before = medians["before"]
        rows.append([mode, *(f"{rate:.0f} ({rate / before:.2f})" for rate in medians.values())])
    return markdown_table(["--migration", *(f"{when}, tok/s" for when in TIMES)], rows)


if __name__ == "__main__":
    sys.exit(main())
