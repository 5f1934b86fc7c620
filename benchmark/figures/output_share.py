"""Longer outputs take more layers off the last stage: the ratio of output to input at input 512."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import Figure, Options, Row, closed_loop, distinct, select
from benchmark.figures.plans import (
    REMOVED,
    made_up,
    served,
    with_auto,
    with_published,
    with_removed,
)
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.workload import SimulatedRequest

INPUT_TOKENS = 512
RATIOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
CLIENTS = 128
PUBLISHED_TAIL = 3.09  # layers
SETTINGS = (("Qwen2.5-14B", "tables"), ("Qwen2.5-32B", "tables"), ("Qwen2.5-32B", "published"))
COLORS = {"auto": "#0072B2", "dynapipe": "#D55E00"}


def compute(options: Options) -> list[Row]:
    rows = []
    for model, sampler in SETTINGS:
        cluster = Cluster(model=model, device="a100-40g-pcie")
        if sampler == "published":
            _, simulation = served(cluster, _workload(RATIOS[-1], options))
            factor = PUBLISHED_TAIL / tail_layers(simulation, cluster)
            cluster = replace(cluster, tail_factor=factor)
        name_of = {"tables": "sampler of the tables", "published": "sampler as published"}
        for ratio in RATIOS:
            workload = _workload(ratio, options)
            plans = {f"{removed} off": with_removed(cluster, removed) for removed in REMOVED}
            plans |= {"auto": with_auto(cluster), "dynapipe": with_published(cluster)}
            for name, plan in plans.items():
                row, simulation = served(plan, workload)
                rows.append(
                    {
                        "setting": f"{model}, {name_of[sampler]}",
                        "ratio": ratio,
                        "plan_name": name,
                        "tail_layers": tail_layers(simulation, plan),
                    }
                    | row
                )
    return rows


def _workload(ratio: float, options: Options) -> list[SimulatedRequest]:
    count = options.num_requests if ratio else 2 * options.num_requests
    outputs = max(1, round(INPUT_TOKENS * ratio))
    return closed_loop(made_up(count, INPUT_TOKENS, outputs), CLIENTS)


def tail_layers(simulation: Simulation, cluster: Cluster) -> float:
    """The time of norm, head and sampling in a step, in layers: the mean over steps that sample."""
    parts = cluster.costs().stage
    steps = [step.shape for step in simulation.steps if step.shape.num_samples]
    return sum(parts.tail_s(shape) / parts.layer_s(shape) for shape in steps) / len(steps)


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(13, 4)
    settings = distinct(rows, "setting")
    for panel, (setting,) in zip(canvas.subplots(1, len(settings)), settings, strict=True):
        even = select(rows, setting=setting, plan_name="0 off")
        for (name,) in distinct(rows, "plan_name"):
            points = select(rows, setting=setting, plan_name=name)
            panel.plot(
                [row["ratio"] for row in points],
                [
                    100 * (row["e2e_ms"] / base["e2e_ms"] - 1)
                    for row, base in zip(points, even, strict=True)
                ],
                label=name,
                marker="o" if name in COLORS else ".",
                color=COLORS.get(name),
                linewidth=2 if name in COLORS else 1,
            )
        panel.set_title(setting, fontsize=10)
        panel.set_xlabel("output : input")
        panel.set_ylabel("mean E2E against even (%)")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (setting,) in distinct(rows, "setting"):
        for (ratio,) in distinct(rows, "ratio"):
            at_ratio = select(rows, setting=setting, ratio=ratio)
            of = {row["plan_name"]: row for row in at_ratio}
            static = [of[f"{removed} off"] for removed in REMOVED]
            best = min(static, key=lambda row: float(row["e2e_ms"]))
            against = {
                name: f"{of[name]['e2e_ms'] / best['e2e_ms'] - 1:+.1%} ({of[name]['plan']})"
                for name in COLORS
            }
            lines.append(
                f"{setting}, O:I {ratio:g}: T_sample/T_layer {of['0 off']['tail_layers']:.2f}, "
                f"best static {best['plan_name']} ({best['e2e_ms'] / static[0]['e2e_ms'] - 1:+.1%} "
                f"against even), auto {against['auto']}, dynapipe {against['dynapipe']} against it"
            )
    return lines


FIGURE = Figure(
    name="output_share",
    title="Output against input length, input 512",
    claim="DynaPipe (D5, D7, D8): with one token of output the even plan is best, and DynaPipe "
    "equal; the longer outputs are the more removed layers are best, and DynaPipe best everywhere. "
    "Sampling takes 3.09 layers.",
    assumptions=f"{CLIENTS} clients that ask again when answered; lengths a quarter more or less. "
    "As published: the sampler's time scaled to 3.09 layers on average, at O:I 0.5.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
