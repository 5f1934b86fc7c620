"""Measures the cost of the live page: the server's load with 0 and with 4 viewers, in turns.

    python -m benchmark.overheads.viewer_cost
    python -m benchmark.overheads.viewer_cost --rounds 5 --viewers 4

Run by hand, some two minutes a round. One server runs all the time; runs without and with viewers
alternate, and which comes first changes from round to round. Viewers read `/pipeline/events` as
the page does, in a process of their own, which takes its time from the same cores. The scheduler's
time a step is taken twice: deciding and booking, as the trace has it, and all processor time of its
process, in which what it tells the viewers is included.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmark.support.command import Command, Options, Report, at_least_one, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import Engine, EngineFailure
from benchmark.support.engines import parse_engine, running
from benchmark.support.loads import Load
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import check_equal_work, make_model, measure
from benchmark.support.paths import SCRATCH
from benchmark.support.process_kinds import process_kind
from benchmark.support.serving_report import Run, spread

LOADS = {"offline": float("inf"), "online": 3.0}
MIN_THROUGHPUT_RATIO = 0.99
MAX_TIME_RATIO = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewedRun:
    """One run of a load; `ticks` and `dropped` are those of all its viewers together."""

    load: str
    round_number: int
    viewers: int
    tokens_per_s: float
    decide_and_book_ms: float
    scheduler_cpu_ms: float
    ticks: int
    dropped: int


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=5, port=31900)
    command.add("--viewers", type=at_least_one, default=4)
    command.add("--requests", type=at_least_one, default=64, help="of each run")
    command.add("--stages", type=int, default=2)
    command.add("--model", default="0.27b", help="preset of benchmark.models.make_model")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    runs = _runs(options)
    return Report(
        name="viewer_cost",
        texts=[ratio_table(runs), run_table(runs)],
        facts={
            "model": {"preset": options.model, "stages": str(options.stages)},
            "load": {
                "offline": f"{options.requests} requests at once",
                "online": f"{options.requests} requests at {LOADS['online']:g} a second",
                "figures": "medians (smallest to largest); ratios within a round",
            },
            "asked": {
                "tokens/s": f">= {MIN_THROUGHPUT_RATIO}",
                "scheduler's time": f"<= {MAX_TIME_RATIO}",
            },
        },
        record={"runs": [asdict(run) for run in runs]},
    )


def ratio_table(runs: Sequence[ViewedRun]) -> str:
    """Markdown: with viewers over without, medians of the ratios within a round."""
    rows = []
    for load in dict.fromkeys(run.load for run in runs):
        cells = [load]
        for name in ("tokens_per_s", "decide_and_book_ms", "scheduler_cpu_ms"):
            ratios = [getattr(b, name) / getattr(a, name) for a, b in _pairs(runs, load)]
            cells.append(_ratio(ratios))
        rows.append(cells)
    return markdown_table(["load", "tokens/s", "deciding and booking", "scheduler's CPU"], rows)


def run_table(runs: Sequence[ViewedRun]) -> str:
    """Markdown: what was measured, by load and viewers."""
    groups: dict[tuple[str, int], list[ViewedRun]] = {}
    for run in runs:
        groups.setdefault((run.load, run.viewers), []).append(run)
    heads = ["load", "viewers", "tokens/s", "deciding and booking, us a step"]
    heads += ["scheduler's CPU, us a step", "updates read", "left out"]
    rows = [
        [
            load,
            str(viewers),
            str(spread([run.tokens_per_s for run in of_kind])),
            str(spread([run.decide_and_book_ms * 1e3 for run in of_kind])),
            str(spread([run.scheduler_cpu_ms * 1e3 for run in of_kind])),
            str(sum(run.ticks for run in of_kind)),
            str(sum(run.dropped for run in of_kind)),
        ]
        for (load, viewers), of_kind in groups.items()
    ]
    return markdown_table(heads, rows)


def _runs(options: Options) -> list[ViewedRun]:
    model = make_model(options.model)
    flags = f"--pp {options.stages} --pp-layer-partition even"
    engine = parse_engine(f"ours {flags}", model, options.port, SCRATCH, usable_cores())
    loads = {
        name: Load(num_requests=options.requests, requests_per_s=rate)
        for name, rate in LOADS.items()
    }
    runs: list[ViewedRun] = []
    work: dict[str, list[Run]] = {name: [] for name in loads}
    with running(engine, SCRATCH / "viewer_cost.log") as server:
        assert server is not None
        measure(engine, model, [loads["offline"]], round_number=0)  # not counted
        for round_number in range(1, options.rounds + 1):
            turns = (0, options.viewers) if round_number % 2 else (options.viewers, 0)
            for name, load in loads.items():
                for viewers in turns:
                    run, viewed = _run(engine, server, model, name, load, viewers, round_number)
                    work[name].append(run)
                    check_equal_work(work[name])
                    runs.append(viewed)
                    say(
                        f"round {round_number}, {name}, {viewers} viewers: "
                        f"{viewed.tokens_per_s:.0f} tokens/s"
                    )
    return runs


def _run(
    engine: Engine,
    server: psutil.Process,
    model: Path,
    name: str,
    load: Load,
    viewers: int,
    round_number: int,
) -> tuple[Run, ViewedRun]:
    scheduler = _scheduler(server)
    counts: dict[str, int] = {"ticks": 0, "dropped": 0}
    with _looking(engine.base_url, viewers, counts):
        before = scheduler.cpu_times()
        (measured,) = measure(engine, model, [load], round_number)
        after = scheduler.cpu_times()
    run = measured.run
    if run.cost is None:
        raise EngineFailure("the run has left no trace")
    if viewers and not counts["ticks"]:
        raise EngineFailure(f"{viewers} viewers have read nothing")
    cpu_s = after.user + after.system - before.user - before.system
    return run, ViewedRun(
        load=name,
        round_number=round_number,
        viewers=viewers,
        tokens_per_s=run.metrics["total_throughput"],
        decide_and_book_ms=run.cost.mean_scheduler_ms,
        scheduler_cpu_ms=cpu_s * 1e3 / run.cost.num_steps,
        ticks=counts["ticks"],
        dropped=counts["dropped"],
    )


@contextmanager
def _looking(url: str, viewers: int, counts: dict[str, int]) -> Iterator[None]:
    """Has `viewers` viewers look meanwhile; what they have read is added to `counts`."""
    if not viewers:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmark.overheads.page_viewers", url, str(viewers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield
        told, _ = process.communicate(timeout=30)
        for key, count in json.loads(told).items():
            counts[key] += count
    finally:
        process.kill()
        process.wait()


def _scheduler(server: psutil.Process) -> psutil.Process:
    for process in server.children(recursive=True):
        if process_kind(process.cmdline(), process.pid) == "scheduler":
            return process
    raise EngineFailure(f"{server.pid} has no scheduler process")


def _pairs(runs: Sequence[ViewedRun], load: str) -> Iterator[tuple[ViewedRun, ViewedRun]]:
    """The runs without and with viewers of each round."""
    of_load = [run for run in runs if run.load == load]
    for number in sorted({run.round_number for run in of_load}):
        in_round = sorted(
            (run for run in of_load if run.round_number == number), key=lambda run: run.viewers
        )
        yield in_round[0], in_round[-1]


def _ratio(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    sys.exit(main())
