"""The independent results on capping a microbatch: decodes only, or all requests of it."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import (
    Figure,
    Options,
    Row,
    change,
    closed_loop,
    numbers,
    select,
)
from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.throttle import PipelineLoad, Policy, TokenBudget

# vLLM's setting: at most so many requests run, over four stages, with this budget of tokens.
MAX_REQUESTS = 32
NUM_STAGES = 4
BUDGET_TOKENS = 8192
CAP = -(-MAX_REQUESTS // NUM_STAGES)
CONCURRENCY = 64
CLUSTER = Cluster(model="Qwen3-32B", device="h100", link="nvlink", num_stages=NUM_STAGES)


def natural(load: PipelineLoad) -> TokenBudget:
    """vLLM's queue: whatever is ready, in one budget."""
    decodes = min(load.ready_decodes, BUDGET_TOKENS)
    return TokenBudget(BUDGET_TOKENS - decodes, decodes, "MaxP")


def decodes_capped(load: PipelineLoad) -> TokenBudget:
    """At most CAP decodes a microbatch; prefill as before."""
    decodes = min(load.ready_decodes, CAP)
    return TokenBudget(BUDGET_TOKENS - decodes, decodes, "MaxP")


def requests_capped(load: PipelineLoad) -> TokenBudget:
    """At most CAP requests a microbatch: what decodes leave of them may prefill, at the mean
    length of the prompts that wait."""
    decodes = min(load.ready_decodes, CAP)
    per_prompt = load.waiting_tokens / max(1, load.prompts)
    prefill = min(BUDGET_TOKENS - decodes, int((CAP - decodes) * per_prompt))
    return TokenBudget(prefill, decodes, "MaxP")


POLICIES: dict[str, Policy] = {
    "natural": natural,
    "decodes capped": decodes_capped,
    "all requests capped": requests_capped,
}


def compute(options: Options) -> list[Row]:
    requests = load_trace(options.trace or "mooncake_conversation", options.num_requests)
    workload = closed_loop(requests, CONCURRENCY)
    rows = []
    for name, policy in POLICIES.items():
        pages = CLUSTER.kv_pool_tokens() // 16
        scheduler = StepScheduler(
            SchedulingArgs(page_size=16, max_running_requests=MAX_REQUESTS),
            policy,
            num_pages=pages,
            num_stages=NUM_STAGES,
            context_length=pages * 16,
        )
        simulation = VirtualPipeline(scheduler, CLUSTER.costs()).run(workload)
        rows.append({"policy": name, **numbers(simulation)})
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(8, 3.5)
    columns = (("output_tokens_per_s", "output tokens/s"), ("bubble_share", "idle share of stages"))
    for panel, (column, label) in zip(canvas.subplots(1, 2), columns, strict=True):
        panel.bar([row["policy"] for row in rows], [row[column] for row in rows], width=0.6)
        panel.set_ylabel(label)
        panel.tick_params(axis="x", labelsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    (plain,) = select(rows, policy="natural")
    return [
        f"{row['policy']} against natural: output tokens/s "
        f"{change(row, plain, 'output_tokens_per_s')}, TTFT {change(row, plain, 'ttft_ms')}, TPOT "
        f"{change(row, plain, 'tpot_ms')}, bubbles {plain['bubble_share']:.0%} to "
        f"{row['bubble_share']:.0%}"
        for row in rows
        if row is not plain
    ]


FIGURE = Figure(
    name="decode_caps",
    title=f"Caps on a microbatch, PP {NUM_STAGES}, {MAX_REQUESTS} running requests, Mooncake",
    claim="vLLM PR 57433 and issue 50410 (T6; Kimi-K3 with speculative decoding, B200, PP 4): a "
    "cap on decodes alone +22.95 % output tokens/s, a cap on all requests -8.21 %.",
    assumptions="Another model on other cards without speculation (direction only is compared); "
    f"{CONCURRENCY} clients in a closed loop; ideal split of layers.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
