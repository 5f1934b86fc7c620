"""Figure a: how many tokens each step carries, Sarathi's budget against the throttle's."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import POLICY_STYLE, Figure, Options, Row, poisson, run, select
from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.simulation import SimulatedStep

POLICIES = ("sarathi", "throttle")
RATE_PER_S = 3.0
SHOWN_STEPS = 600


def compute(options: Options) -> list[Row]:
    """A row for each policy: mean and deviation of all its steps' times, and SHOWN_STEPS steps.

    These are from the middle of the run, where neither the start nor the end shows.
    """
    cluster = Cluster(model="Qwen2.5-32B", device="a100-40g-pcie", link="pcie")
    workload = poisson(options.trace or "azure_conv", RATE_PER_S, options)
    return [
        _row(policy, run(cluster, ThrottleArgs(policy=policy), workload).steps)
        for policy in POLICIES
    ]


def _row(policy: str, steps: Sequence[SimulatedStep]) -> Row:
    stage_ms = 1e3 * np.array([step.ends_s[1] - step.starts_s[1] for step in steps])
    shown = slice(len(steps) // 2, len(steps) // 2 + SHOWN_STEPS)
    return {
        "policy": policy,
        "num_steps": len(steps),
        "mean_stage_ms": float(stage_ms.mean()),
        "deviation_stage_ms": float(stage_ms.std()),
        "prefill_tokens": [step.record.prefill_tokens for step in steps[shown]],
        "decodes": [step.record.decodes for step in steps[shown]],
        "stage_ms": stage_ms[shown].round(3).tolist(),
    }


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(11, 6)
    panels = canvas.subplots(2, len(POLICIES), sharey="row", squeeze=False)
    for tokens, times, policy in zip(*panels, POLICIES, strict=True):
        (row,) = select(rows, policy=policy)
        steps = range(len(row["stage_ms"]))
        prefill = row["prefill_tokens"]
        color = POLICY_STYLE[policy]["color"]
        tokens.bar(steps, prefill, width=1.0, color=color, alpha=0.6, label="prefill")
        tokens.bar(steps, row["decodes"], width=1.0, bottom=prefill, color="black", label="decode")
        tokens.set_title(policy)
        tokens.set_ylabel("tokens of a step")
        tokens.legend(fontsize=8)
        times.plot(steps, row["stage_ms"], color=color, linewidth=0.8)
        times.set_ylabel("time of a middle stage (ms)")
        times.set_xlabel("step")


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for policy in POLICIES:
        (row,) = select(rows, policy=policy)
        mean_ms, deviation_ms = row["mean_stage_ms"], row["deviation_stage_ms"]
        lines.append(
            f"{policy}: a step keeps a middle stage for {mean_ms:.1f} ms, standard deviation "
            f"{deviation_ms:.1f} ms (coefficient of variation {deviation_ms / mean_ms:.2f})"
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
