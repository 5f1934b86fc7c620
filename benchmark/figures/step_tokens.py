"""Figure a: how many tokens each step carries, Sarathi's budget against the throttle's."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import POLICY_STYLE, Figure, Options, Row, poisson, run, select
from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster

POLICIES = ("sarathi", "throttle")
RATE_PER_S = 3.0
SHOWN_STEPS = 600


def compute(options: Options) -> list[Row]:
    cluster = Cluster(model="Qwen2.5-32B", device="a100-40g-pcie", link="pcie")
    workload = poisson(options.trace or "azure_conv", RATE_PER_S, options)
    return [
        {
            "policy": policy,
            "step": step.record.step_id,
            "prefill_tokens": step.record.prefill_tokens,
            "decodes": step.record.decodes,
            "stage_ms": 1e3 * (step.ends_s[1] - step.starts_s[1]),
        }
        for policy in POLICIES
        for step in run(cluster, ThrottleArgs(policy=policy), workload).steps
    ]


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(11, 6)
    panels = canvas.subplots(2, len(POLICIES), sharey="row", squeeze=False)
    for tokens, times, policy in zip(*panels, POLICIES, strict=True):
        # From the middle of the run, where neither the start nor the end shows.
        own = select(rows, policy=policy)
        shown = own[len(own) // 2 :][:SHOWN_STEPS]
        steps = range(len(shown))
        prefill = [row["prefill_tokens"] for row in shown]
        color = POLICY_STYLE[policy]["color"]
        tokens.bar(steps, prefill, width=1.0, color=color, alpha=0.6, label="prefill")
        tokens.bar(
            steps,
            [row["decodes"] for row in shown],
            width=1.0,
            bottom=prefill,
            color="black",
            label="decode",
        )
        tokens.set_title(policy)
        tokens.set_ylabel("tokens of a step")
        tokens.legend(fontsize=8)
        times.plot(steps, [row["stage_ms"] for row in shown], color=color, linewidth=0.8)
        times.set_ylabel("time of a middle stage (ms)")
        times.set_xlabel("step")


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for policy in POLICIES:
        times = np.array([row["stage_ms"] for row in select(rows, policy=policy)])
        lines.append(
            f"{policy}: a step keeps a middle stage for {times.mean():.1f} ms, standard deviation "
            f"{times.std():.1f} ms (coefficient of variation {times.std() / times.mean():.2f})"
        )
    return lines


FIGURE = Figure(
    name="step_tokens",
    title=f"Tokens per step, Qwen2.5-32B, PP 4, Azure-conv at {RATE_PER_S:g} req/s",
    claim="gLLM (G21, figures 1 and 4): under Sarathi's budget the tokens of a step fluctuate "
    "between full chunks and bare decodes, and GPU utilisation with them.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
