"""Figure h: the share of time that stages wait, by cause, before and after throttling."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from benchmark.figures.bubbles import CAUSES, bubble_causes
from benchmark.figures.figure import Figure, Options, Row, distinct, poisson, run, select
from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster

SETTINGS = (
    ("Qwen2.5-14B", "a100-40g-pcie", "sharegpt", 28.0),
    ("Qwen2.5-14B", "a100-40g-pcie", "azure_conv", 8.0),
    ("Qwen2.5-32B", "a100-40g-pcie", "sharegpt", 16.0),
    ("Qwen2.5-32B", "a100-40g-pcie", "azure_conv", 4.0),
)
POLICIES = ("sarathi", "throttle")


def compute(options: Options) -> list[Row]:
    rows = []
    for model, device, trace, rate in SETTINGS:
        cluster = Cluster(model=model, device=device, link="net73")
        for policy in POLICIES:
            workload = poisson(options.trace or trace, rate, options)
            steps = run(cluster, ThrottleArgs(policy=policy), workload).steps
            causes = bubble_causes([step.shape for step in steps], cluster.costs())
            setting = f"{model}\n{options.trace or trace}, {rate:g} req/s"
            rows.append({"setting": setting, "policy": policy, **causes})
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(10, 5)
    panel = canvas.subplots()
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for cause in CAUSES:
        heights = [100 * row[cause] for row in rows]
        panel.bar(places, heights, bottom=bottom, label=cause, width=0.7)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    panel.set_xticks(places, [f"{row['policy']}\n{row['setting']}" for row in rows], fontsize=7)
    panel.set_ylabel("idle share of the stages (%)")
    panel.legend(fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (setting,) in distinct(rows, "setting"):
        before, after = (select(rows, setting=setting, policy=policy)[0] for policy in POLICIES)
        parts = "; ".join(f"{cause} {before[cause]:.1%} to {after[cause]:.1%}" for cause in CAUSES)
        whole = [sum(row[cause] for cause in CAUSES) for row in (before, after)]
        lines.append(
            f"{setting.replace(chr(10), ', ')}: {whole[0]:.1%} to {whole[1]:.1%} ({parts})"
        )
    return lines


FIGURE = Figure(
    name="bubble_causes",
    title="Bubbles by cause, Sarathi's budget against the throttle's, PP 4",
    claim="Sarathi-Serve names three causes, prefill sizes, prefill against decode, decode sizes; "
    "DynaPipe adds the sampler on the last stage (3.09 layers on its machines).",
    assumptions="Each cause is taken out in turn, in the order of the legend from the bottom, from "
    "the steps of a run, which are then run again back to back; sampling work is assumed.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
