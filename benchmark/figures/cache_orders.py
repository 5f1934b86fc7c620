"""Cache-aware orders against first come first served, with more prefixes than the pool holds."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import Figure, Options, Row, change, distinct, numbers, run, select
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.summary import latency
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.workload import (
    Segment,
    SimulatedRequest,
    TokenIds,
    poisson_arrivals,
)

CLUSTER = Cluster(model="Qwen2.5-14B", device="a100-40g-pcie", link="net73", pool_tokens=128 * 1024)
# System prompts, each before the questions of some of the requests: twice what the pool holds.
NUM_PREFIXES = 128
PREFIX_TOKENS = 2048
# Requests a second; all at once.
RATES = (6.0, 8.0, float("inf"))
UNBOUNDED = 10**6
DEFAULT = SchedulingArgs().max_overtakes
# The order, and the most overtakes.
VARIANTS = {
    "fcfs": ("fcfs", DEFAULT),
    "lpm": ("lpm", DEFAULT),
    "lpm, 16 overtakes": ("lpm", 16),
    "lpm, no bound": ("lpm", UNBOUNDED),
    "dfs-weight": ("dfs-weight", DEFAULT),
    "dfs-weight, no bound": ("dfs-weight", UNBOUNDED),
}
COLUMNS = (
    ("cache_hit_share", "hits", 100.0, "% of prompt tokens"),
    ("output_tokens_per_s", "throughput", 1.0, "output tokens/s"),
    ("ttft_ms", "mean TTFT", 1e-3, "s"),
    ("worst_ttft_ms", "worst TTFT", 1e-3, "s"),
)


def compute(options: Options) -> list[Row]:
    rows = []
    for rate in RATES:
        workload = _workload(rate, options)
        for variant, (schedule_policy, max_overtakes) in VARIANTS.items():
            scheduling = SchedulingArgs(
                max_running_requests=1024,
                schedule_policy=schedule_policy,
                max_overtakes=max_overtakes,
            )
            simulation = run(CLUSTER, ThrottleArgs(policy="throttle"), workload, scheduling)
            served = filter(None, map(latency, simulation.requests))
            worst = max(one.ttft_ms for one in served)
            load = "all at once" if rate == float("inf") else f"{rate:g} req/s"
            row = {"load": load, "variant": variant, "worst_ttft_ms": worst}
            rows.append(row | numbers(simulation))
    return rows


def _workload(rate: float, options: Options) -> list[SimulatedRequest]:
    """Questions and answers of the trace's lengths, each behind a prefix drawn at random."""
    random, ids = Random(options.seed), TokenIds()
    prefixes = [ids.fresh(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    requests = []
    for one in load_trace(options.trace or "sharegpt", options.num_requests):
        prompt: tuple[Segment, ...] = (random.choice(prefixes), ids.fresh(one.input_tokens))
        requests.append(replace(one, prompt=prompt, output=ids.fresh(one.output_tokens)))
    return poisson_arrivals(requests, rate, random)


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(14, 4)
    loads = [load for (load,) in distinct(rows, "load")]
    width = 0.8 / len(VARIANTS)
    panels = canvas.subplots(1, len(COLUMNS))
    for panel, (column, label, factor, unit) in zip(panels, COLUMNS, strict=True):
        for number, variant in enumerate(VARIANTS):
            values = [factor * row[column] for row in select(rows, variant=variant)]
            places = [place + number * width for place in range(len(loads))]
            panel.bar(places, values, width=width, label=variant)
        panel.set_xticks([place + 0.35 for place in range(len(loads))], loads, fontsize=8)
        panel.set_ylabel(f"{label} ({unit})")
    panels[0].legend(fontsize=7)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (load,) in distinct(rows, "load"):
        for variant in VARIANTS:
            (base,) = select(rows, load=load, variant="fcfs")
            (row,) = select(rows, load=load, variant=variant)
            line = (
                f"{load}, {variant}: {row['cache_hit_share']:.0%} hits, "
                f"{row['output_tokens_per_s']:.0f} output tokens/s, TTFT mean "
                f"{row['ttft_ms'] / 1e3:.1f} s, p99 {row['ttft_p99_ms'] / 1e3:.1f} s, worst "
                f"{row['worst_ttft_ms'] / 1e3:.1f} s"
            )
            if variant != "fcfs":
                line += (
                    f"; against fcfs: throughput {change(row, base, 'output_tokens_per_s')}, mean "
                    f"TTFT {change(row, base, 'ttft_ms')}, worst "
                    f"{change(row, base, 'worst_ttft_ms')}"
                )
            lines.append(line)
    return lines


FIGURE = Figure(
    name="cache_orders",
    title="Cache-aware orders of waiting requests against first come first served, PP 4",
    claim="None: SGLang's longest prefix match and depth-first order by weight, here with a bound "
    f"on overtakes ({DEFAULT} by default).",
    assumptions=f"{NUM_PREFIXES} system prompts of {PREFIX_TOKENS} tokens, drawn at random for "
    f"each question of ShareGPT; the pool holds {CLUSTER.pool_tokens} tokens, half of them.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
