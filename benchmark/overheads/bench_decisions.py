"""Times the decisions of the scheduler with long queues: no model, no processes, no stages.

    python -m benchmark.overheads.bench_decisions

Prints medians, 99th percentiles and maxima of `next_microbatch`, `on_result` and `add`, in elapsed
and in processor time: where they differ, other processes had the core. The target is a median
below 1 ms and a 99th percentile below 5 ms with 10,000 waiting requests of 2,000 tokens.
"""

import sys
from collections.abc import Sequence
from typing import Any

from benchmark.overheads.decision_load import OPERATIONS, DecisionLoad, Scenario, Timings
from benchmark.support.command import Command, Options, Report, at_least_one, progress, say
from benchmark.support.dated_result import markdown_table
from sgl_pipeline.args import SCHEDULE_POLICIES
from sgl_pipeline.args.scheduling_args import CACHE_AWARE_POLICIES
from sgl_pipeline.managers.front.garbage import postpone_full_collections

# Prompts of 2,000 tokens for 100,000 requests would take 3 GB, so growth goes on with 200.
SCENARIOS = (
    Scenario(name="100 waiting", waiting=100),
    Scenario(name="1,000 waiting", waiting=1000),
    Scenario(name="10,000 waiting (the target)"),
    Scenario(name="10,000 of 200 tokens", prompt_tokens=200, shared_tokens=100),
    Scenario(name="100,000 of 200 tokens", waiting=100_000, prompt_tokens=200, shared_tokens=100),
    Scenario(name="all decodes in one step", num_stages=1, output_tokens=(800, 1200)),
    Scenario(name="one prefix for half", num_prefixes=1, shared_tokens=1900),
    Scenario(name="pages for 60 %, eviction", pool_share=0.6),
    Scenario(
        name="pages for 40 %, retraction",
        prompt_tokens=200,
        shared_tokens=100,
        output_tokens=(500, 1500),
        pool_share=0.4,
        policy="sarathi",
    ),
    Scenario(name="three priorities", num_priorities=3),
    Scenario(name="fair shares, two tenants", num_tenants=2),
    Scenario(name="fair shares, 1,000 tenants", num_tenants=1000),
    # Three slots for each running request, as a server has without a flag.
    Scenario(name="layers with states", num_state_slots=3 * 512),
    *(
        Scenario(
            name=f"throttle-time, {waiting:,} waiting", waiting=waiting, policy="throttle-time"
        )
        for waiting in (1000, 10_000)
    ),
    *(
        Scenario(name=f"{policy}, {waiting:,} waiting", waiting=waiting, schedule_policy=policy)
        for policy in CACHE_AWARE_POLICIES
        for waiting in (1000, 10_000)
    ),
    *(
        Scenario(
            name=f"{policy}, one prefix for half, eviction",
            num_prefixes=1,
            shared_tokens=1900,
            pool_share=0.6,
            schedule_policy=policy,
        )
        for policy in SCHEDULE_POLICIES
        if policy != "lof"
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__)
    command.add("--steps", type=at_least_one, default=4000, help="timed steps (default: 4000)")
    command.add("--scenarios", action="append", help="part of the names of those to run")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    # As in the server.
    postpone_full_collections()
    rows: list[dict[str, Any]] = []
    parts = options.scenarios or [""]
    chosen = [one for one in SCENARIOS if any(part in one.name for part in parts)]
    with progress(len(chosen), "scenarios") as bar:
        for scenario in chosen:
            rows.append(summarize(scenario, DecisionLoad(scenario).measure(options.steps)))
            say(f"{scenario.name}: {_one_line(rows[-1])}")
            bar.update()
    return Report(
        name="decisions",
        texts=[decision_table(rows)],
        facts={"load": {"steps a scenario": str(options.steps)}},
        record={"rows": rows},
    )


def summarize(scenario: Scenario, timings: Timings) -> dict[str, Any]:
    """Milliseconds by operation and clock: median, 99th percentile, maximum."""
    return {
        "scenario": scenario.name,
        "mean_running": timings.mean_running,
        "num_retractions": timings.num_retractions,
        "elapsed_ms": {name: _quantiles(timings.elapsed_s[name]) for name in OPERATIONS},
        "processor_ms": {name: _quantiles(timings.processor_s[name]) for name in OPERATIONS},
    }


def decision_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: median, 99th percentile and maximum, elapsed, and the 99th of processor time."""
    heads = ["scenario", "running", "retractions", *(f"{name} ms" for name in OPERATIONS)]
    cells = []
    for row in rows:
        counts = [row["scenario"], f"{row['mean_running']:.0f}", str(row["num_retractions"])]
        cells.append(counts + [_cell(row, operation) for operation in OPERATIONS])
    return markdown_table(heads, cells)


def _cell(row: dict[str, Any], operation: str) -> str:
    elapsed, processor = row["elapsed_ms"][operation], row["processor_ms"][operation]
    if elapsed is None:
        return "none"
    median, p99, largest = (f"{elapsed[key]:.2f}" for key in ("median", "p99", "max"))
    return f"{median}, {p99}, {largest} (p99 of processor time {processor['p99']:.2f})"


def _quantiles(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    ranks = {"median": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: round(1e3 * ordered[int(rank * (len(ordered) - 1))], 4)
        for name, rank in ranks.items()
    }


def _one_line(row: dict[str, Any]) -> str:
    return "; ".join(f"{name} {_cell(row, name)}" for name in OPERATIONS)


if __name__ == "__main__":
    sys.exit(main())
