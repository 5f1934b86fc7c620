"""Figure c: throughput at saturation against the number of stages."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import (
    POLICY_STYLE,
    Figure,
    Options,
    Row,
    distinct,
    numbers,
    poisson,
    run,
    select,
)
from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.traces import load_trace

MODELS = ("Qwen2.5-14B", "Qwen2.5-32B")
STAGES = (1, 2, 3, 4, 8, 16)
LINKS = ("pcie", "net73")
POLICIES = ("throttle", "sarathi")
# Requests a second, for each stage: above what any of these carries.
RATE_PER_STAGE = 4.0
# Throughput counts between these parts of a run: filling and draining it are not saturation.
STEADY = (0.25, 0.6)


def compute(options: Options) -> list[Row]:
    rows = []
    name = options.trace or "azure_conv"
    trace = load_trace(name)
    for model in MODELS:
        for link in LINKS:
            for stages in STAGES:
                cluster = Cluster(model=model, device="a100-80g", link=link, num_stages=stages)
                # `num_requests` for four stages, alike for each stage, as far as the trace goes.
                count = min(options.num_requests * stages // 4, len(trace))
                longer = replace(options, num_requests=count)
                workload = poisson(name, RATE_PER_STAGE * stages, longer)
                for policy in POLICIES:
                    simulation = run(cluster, ThrottleArgs(policy=policy), workload)
                    setting = {"model": model, "link": link, "stages": stages, "policy": policy}
                    steady = {"steady_tokens_per_s": steady_tokens_per_s(simulation)}
                    rows.append(setting | steady | numbers(simulation))
    return rows


def steady_tokens_per_s(simulation: Simulation) -> float:
    """Tokens computed, prompt and output, a second in the middle of the run."""
    end_s = simulation.steps[-1].ends_s[-1]
    since_s, until_s = (part * end_s for part in STEADY)
    tokens = sum(
        step.shape.num_tokens for step in simulation.steps if since_s <= step.ends_s[-1] < until_s
    )
    return tokens / (until_s - since_s)


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(11, 4)
    settings = distinct(rows, "model", "link")
    for panel, (model, link) in zip(
        canvas.subplots(1, len(settings), squeeze=False)[0], settings, strict=True
    ):
        for policy in POLICIES:
            points = select(rows, model=model, link=link, policy=policy)
            stages = [row["stages"] for row in points]
            rates = [row["steady_tokens_per_s"] for row in points]
            panel.plot(stages, rates, label=policy, **POLICY_STYLE[policy])
            if policy == "throttle":
                linear = [rates[0] * count / stages[0] for count in stages]
                panel.plot(stages, linear, color="black", linewidth=0.6, label="linear")
        panel.set_title(f"{model}, {link}", fontsize=10)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xticks(STAGES, STAGES)
        panel.set_xlabel("stages")
        panel.set_ylabel("tokens/s, prompt and output")
        panel.legend(fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for model, link, policy in distinct(rows, "model", "link", "policy"):
        points = select(rows, model=model, link=link, policy=policy)
        first = points[0]
        speedups = ", ".join(
            f"{row['steady_tokens_per_s'] / first['steady_tokens_per_s']:.2f}x at {row['stages']}"
            for row in points[1:]
        )
        lines.append(f"{model}, {link}, {policy}: {speedups} stages")
    return lines


FIGURE = Figure(
    name="scaling",
    title="Throughput at saturation against stages, Azure-conv",
    claim="gLLM (G8): near linear from 1 to 4 GPUs or nodes; vLLM sub-linear for the 14B, linear "
    "for the 32B model.",
    assumptions="A100-80G, so that one card holds the 32B model; a card more is also more KV.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
