"""Turns measured runs into medians, ratios and the tables of a dated result.

Used by `bench_serving.py`; pure functions of numbers, so that the report can be tested without a
server. The spread that it prints is the smallest and the largest run, never a confidence interval.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmark.support.dated_result import markdown_table
from sgl_pipeline.goodput import LatencyTarget, RequestLatency, goodput
from sgl_pipeline.records.trace import StepRecord

# Metric names of `sglang.bench_serving`, and how a table heads them.
METRICS = {
    "total_throughput": "total tok/s",
    "mean_ttft_ms": "mean TTFT ms",
    "p99_ttft_ms": "p99 TTFT ms",
    "mean_tpot_ms": "mean TPOT ms",
    "p99_tpot_ms": "p99 TPOT ms",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCost:
    """The costs of one run inside our server, from its trace.

    Scheduler time is deciding and encoding a step plus applying its result. A stage is idle while
    it waits for its input: `stage_idle_shares[s]` = wait / (wait + compute). `cache_hit_share` is
    of the prompt tokens of requests that ended.
    """

    num_steps: int
    mean_prefill_tokens: float
    mean_decodes: float
    mean_scheduler_ms: float
    p99_scheduler_ms: float
    stage_idle_shares: tuple[float, ...]
    cache_hit_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run of one engine; `metrics` has the keys of METRICS, `cost` is for ours.

    `memory_mib` is that of the server's processes right after the run, None where nobody looked.
    `latencies` are those of its requests, as the client saw them.
    """

    engine: str
    round: int
    input_tokens: int
    output_tokens: int
    duration_s: float
    metrics: Mapping[str, float]
    cost: PipelineCost | None = None
    memory_mib: float | None = None
    latencies: tuple[RequestLatency, ...] = ()


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes over the rounds."""

    median: float
    smallest: float
    largest: float

    def __str__(self) -> str:
        digits = 0 if self.largest >= 100 else 1
        text = f"{self.median:.{digits}f}"
        if self.smallest == self.largest:
            return text
        return f"{text} ({self.smallest:.{digits}f} to {self.largest:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def pipeline_cost(records: Sequence[StepRecord]) -> PipelineCost | None:
    """The cost of the run that `records` trace, or None for fewer than two steps.

    The first step's waits are left out: they reach back into the time before the run.
    """
    if len(records) < 2:
        return None
    scheduler_ms = sorted(record.schedule_ms + record.result_ms for record in records)
    shares = []
    for stage in range(len(records[0].stages)):
        waited = sum(record.stages[stage].input_wait_ms for record in records[1:])
        computed = sum(record.stages[stage].compute_ms for record in records[1:])
        shares.append(waited / (waited + computed) if waited + computed else 0.0)
    ended = [request for record in records for request in record.ended]
    return PipelineCost(
        num_steps=len(records),
        mean_prefill_tokens=statistics.fmean(record.prefill_tokens for record in records),
        mean_decodes=statistics.fmean(record.decodes for record in records),
        mean_scheduler_ms=statistics.fmean(scheduler_ms),
        p99_scheduler_ms=scheduler_ms[int(0.99 * (len(scheduler_ms) - 1))],
        stage_idle_shares=tuple(shares),
        cache_hit_share=sum(request.cached_tokens for request in ended)
        / max(1, sum(request.prompt_tokens for request in ended)),
    )


def throughput_ratios(runs: Sequence[Run], against: str) -> dict[str, float]:
    """Median total throughput of each engine over that of `against`."""
    medians = {
        engine: spread([run.metrics["total_throughput"] for run in of_engine]).median
        for engine, of_engine in _by_engine(runs).items()
    }
    return {engine: median / medians[against] for engine, median in medians.items()}


def comparison_table(
    runs: Sequence[Run], against: str | None, target: LatencyTarget | None = None
) -> str:
    """Markdown: one row an engine, medians with extremes, memory where all runs have it, goodput in
    per cent where there is a target, and the throughput ratio."""
    ratios = throughput_ratios(runs, against) if against else {}
    with_memory = all(run.memory_mib is not None for run in runs)
    heads = ["engine", "rounds", *METRICS.values(), *(["PSS MiB"] if with_memory else [])]
    heads += ["goodput %"] if target else []
    heads += [f"of {against}"] if against else []
    rows = []
    for engine, of_engine in _by_engine(runs).items():
        cells = [engine, str(len(of_engine))]
        cells += [str(spread([run.metrics[metric] for run in of_engine])) for metric in METRICS]
        if with_memory:
            cells.append(str(spread([run.memory_mib or 0.0 for run in of_engine])))
        if target is not None:
            shares = [100 * goodput(run.latencies, target) for run in of_engine]
            cells.append(str(spread(shares)))
        rows.append([*cells, *([f"{ratios[engine]:.3f}"] if against else [])])
    return markdown_table(heads, rows)


def cost_table(runs: Sequence[Run]) -> str:
    """Markdown: scheduler cost and stage idle shares of every traced run; empty without one."""
    rows = [
        [
            f"{run.engine}, round {run.round}",
            str(run.cost.num_steps),
            f"{run.cost.mean_prefill_tokens:.0f} + {run.cost.mean_decodes:.1f}",
            f"{run.cost.mean_scheduler_ms:.2f}, {run.cost.p99_scheduler_ms:.2f}",
            ", ".join(f"{share:.0%}" for share in run.cost.stage_idle_shares),
            f"{run.cost.cache_hit_share:.0%}",
        ]
        for run in runs
        if run.cost is not None
    ]
    heads = ["run", "steps", "prefill tokens + decodes a step", "scheduler ms a step (mean, p99)"]
    heads += ["idle share of each stage", "cache hits"]
    return markdown_table(heads, rows) if rows else ""


def _by_engine(runs: Sequence[Run]) -> dict[str, list[Run]]:
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.engine, []).append(run)
    return grouped
