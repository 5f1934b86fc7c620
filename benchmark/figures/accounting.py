"""Figure g: radix-exact counts against naive ones, on workloads that share prefixes."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from matplotlib.figure import Figure as Canvas

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
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.traces import load_trace, shared_prefixes, thinking
from sgl_pipeline.simulator.workload import SimulatedRequest, poisson_arrivals

# Counts, and gLLM's #MinP: 32 as in the paper, and 128, below which a step of this model costs the
# same, because reading the weights bounds it.
VARIANTS = {
    "radix": ("radix", 32),
    "radix, MinP 128": ("radix", 128),
    "radix-unshared": ("radix-unshared", 32),
    "gllm": ("gllm", 32),
    "gllm, MinP 128": ("gllm", 128),
    "naive": ("naive", 32),
}
# What is compared with what in the words.
COMPARISONS = (
    ("radix", "gllm"),
    ("radix", "naive"),
    ("radix", "radix-unshared"),
    ("radix, MinP 128", "gllm"),
    ("radix, MinP 128", "gllm, MinP 128"),
)
HIT_RATES = (0.0, 0.25, 0.5, 0.75, 0.9)
SHARING_REQUESTS = 32
# Uncached prompt tokens a second stay alike over the hit rates, so that load does not vanish.
PREFILL_TOKENS_PER_S = 5200.0
CLUSTER = Cluster(model="Qwen2.5-32B", device="a100-80g", link="net73")
COLUMNS = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E"))


def compute(options: Options) -> list[Row]:
    rows = []
    for name, workload in _workloads(options):
        for variant, (accounting, min_prefill_tokens) in VARIANTS.items():
            scheduling = SchedulingArgs(max_running_requests=1024, accounting=accounting)
            throttle = ThrottleArgs(min_prefill_tokens=min_prefill_tokens)
            simulation = run(CLUSTER, throttle, workload, scheduling)
            rows.append({"workload": name, "variant": variant, **numbers(simulation)})
    return rows


def _workloads(options: Options) -> list[tuple[str, list[SimulatedRequest]]]:
    base = load_trace(options.trace or "azure_conv", options.num_requests)
    mean_input = sum(request.input_tokens for request in base) / len(base)
    workloads = []
    for hit_rate in HIT_RATES:
        rate = PREFILL_TOKENS_PER_S / mean_input / max(1.0 - hit_rate, 0.25)
        requests = shared_prefixes(base, hit_rate, SHARING_REQUESTS)
        arriving = poisson_arrivals(requests, rate, Random(options.seed))
        workloads.append((f"{hit_rate:.0%} shared, {rate:.1f} req/s", arriving))
    chats = thinking(
        load_trace("sharegpt_multiturn", options.num_requests), 10.0, Random(options.seed)
    )
    arriving = poisson_arrivals(chats, 1.2, Random(options.seed))
    workloads.append(("ShareGPT, turns of chats", arriving))
    # Mooncake's prompts are 12,000 tokens on average: a tenth of its rate, and none beyond 32,768.
    long_prompts = load_trace("mooncake_conversation", options.num_requests)
    fitting = [
        replace(request, arrival_s=request.arrival_s * 6)
        for request in long_prompts
        if request.input_tokens <= 32768
    ]
    workloads.append(("Mooncake conversation", fitting))
    return workloads


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(13, 4)
    workloads = [name for (name,) in distinct(rows, "workload")]
    for panel, (column, label) in zip(canvas.subplots(1, len(COLUMNS)), COLUMNS, strict=True):
        width = 0.8 / len(VARIANTS)
        for number, variant in enumerate(VARIANTS):
            points = select(rows, variant=variant)
            places = [place + number * width for place in range(len(workloads))]
            panel.bar(places, [row[column] for row in points], width=width, label=variant)
        panel.set_xticks(
            [place + 0.3 for place in range(len(workloads))], workloads, rotation=30, ha="right"
        )
        panel.tick_params(axis="x", labelsize=7)
        panel.set_ylabel(f"mean {label} (ms)")
        panel.set_yscale("log")
    panel.legend(fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (workload,) in distinct(rows, "workload"):
        for ours, others in COMPARISONS:
            (new,) = select(rows, workload=workload, variant=ours)
            (old,) = select(rows, workload=workload, variant=others)
            changes = ", ".join(f"{label} {change(new, old, name)}" for name, label in COLUMNS)
            lines.append(
                f"{workload} ({new['cache_hit_share']:.0%} hits): {ours} against {others}: "
                f"{changes}, throughput {change(new, old, 'output_tokens_per_s')}"
            )
    return lines


FIGURE = Figure(
    name="accounting",
    title="Radix-exact against naive accounting, Qwen2.5-32B, PP 4",
    claim="None: the paper switches prefix reuse off. This project's own idea: a hit is no waiting "
    "work, and evictable pages are free. gllm is gLLM's code: whole prompts wait, cached pages are "
    "free.",
    assumptions="Shared prefixes are made up on Azure-conv's lengths, for groups of "
    f"{SHARING_REQUESTS} requests; chats pause for 10 s on average between turns.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
