"""Figure g, second part: what #T does at each hit rate, by how waiting tokens are counted."""

from collections.abc import Sequence
from random import Random

from matplotlib.figure import Figure as Canvas

from benchmark.figures.accounting import CLUSTER, SHARING_REQUESTS
from benchmark.figures.figure import (
    Figure,
    Options,
    Row,
    change,
    distinct,
    numbers,
    run,
    select,
)
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.simulator.traces import load_trace, shared_prefixes
from sgl_pipeline.simulator.workload import poisson_arrivals

SPREAD_STEPS = (2, 4, 8, 16)
STYLES = {"radix": "-", "gllm": "--"}
SHARED = (0.0, 0.5, 0.75, 0.9)
# Of uncached prompt tokens, alike at all hit rates; near the most that the cluster carries.
PREFILL_TOKENS_PER_S = 6000.0
# The share of shared tokens that another request has computed before: measured in these workloads.
HITS_OF_SHARED = 0.86
COLUMNS = (
    ("ttft_ms", "TTFT"),
    ("tpot_ms", "TPOT"),
    ("output_tokens_per_s", "throughput"),
    ("bubble_share", "bubble share"),
)
UNITS = {"ttft_ms": "ms", "tpot_ms": "ms", "output_tokens_per_s": "output tokens/s"}


def compute(options: Options) -> list[Row]:
    base = load_trace(options.trace or "azure_conv", options.num_requests)
    mean_input = sum(request.input_tokens for request in base) / len(base)
    rows = []
    for shared in SHARED:
        rate = PREFILL_TOKENS_PER_S / mean_input / (1.0 - HITS_OF_SHARED * shared)
        requests = shared_prefixes(base, shared, SHARING_REQUESTS)
        workload = poisson_arrivals(requests, rate, Random(options.seed))
        for steps in SPREAD_STEPS:
            for accounting in STYLES:
                throttle = ThrottleArgs(prefill_spread_steps=steps)
                scheduling = SchedulingArgs(max_running_requests=1024, accounting=accounting)
                simulation = run(CLUSTER, throttle, workload, scheduling)
                setting = {"shared": shared, "rate": rate, "steps": steps, "counts": accounting}
                rows.append(setting | numbers(simulation))
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(14, 3.8)
    for panel, (column, label) in zip(canvas.subplots(1, len(COLUMNS)), COLUMNS, strict=True):
        for number, (shared,) in enumerate(distinct(rows, "shared")):
            for accounting, style in STYLES.items():
                points = select(rows, shared=shared, counts=accounting)
                panel.plot(
                    [row["steps"] for row in points],
                    [row[column] for row in points],
                    style,
                    color=f"C{number}",
                    marker="o",
                    markersize=4,
                    label=f"{shared:.0%} shared, {accounting}",
                )
        panel.set_xscale("log", base=2)
        panel.set_xticks(SPREAD_STEPS, [str(steps) for steps in SPREAD_STEPS])
        panel.set_xlabel("prefill_spread_steps (#T)")
        panel.set_ylabel(f"{label} ({UNITS[column]})" if column in UNITS else label)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panel.legend(fontsize=7)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for shared, steps in distinct(rows, "shared", "steps"):
        (exact,) = select(rows, shared=shared, steps=steps, counts="radix")
        (gllm,) = select(rows, shared=shared, steps=steps, counts="gllm")
        changes = ", ".join(f"{label} {change(exact, gllm, name)}" for name, label in COLUMNS[:3])
        hits = f"{exact['cache_hit_share']:.0%} hits, {exact['rate']:.1f} req/s"
        lines.append(
            f"{shared:.0%} shared ({hits}), #T {steps}: radix against gllm: {changes}, "
            f"bubbles {exact['bubble_share']:.0%} against {gllm['bubble_share']:.0%}"
        )
    return lines


FIGURE = Figure(
    name="spread",
    title="What #T does at each hit rate, by exact and by gLLM's counts, Qwen2.5-32B, PP 4",
    claim="None: the paper switches prefix reuse off. With whole prompts counted, #T acts as "
    "#T times the share that is no hit.",
    assumptions="Shared prefixes are made up on Azure-conv's lengths, for groups of "
    f"{SHARING_REQUESTS} requests; arrival rates keep the uncached prompt tokens a second alike.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
