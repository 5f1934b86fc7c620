"""The window over which the planner must agree with itself, from 1 step to 200."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import Figure, Options, Row, distinct, select
from benchmark.figures.plans import (
    REMOVED,
    load,
    served,
    with_auto,
    with_published,
    with_removed,
)
from sgl_pipeline.simulator.experiment import Cluster

WINDOWS = (1, 2, 5, 10, 25, 50, 100, 200)
# Under Sarathi's policy steps differ more from one to the next.
SETTINGS = (
    ("Qwen2.5-32B", 16.0, "throttle"),
    ("Qwen2.5-32B", 16.0, "sarathi"),
    ("Qwen2.5-14B", 28.0, "throttle"),
)
# Whether pages are copied by the stage itself or beside its steps, and weights are resident.
RULES = {
    "dynapipe": lambda cluster, window: with_published(cluster, window),
    "dynapipe, moved as ours": lambda cluster, window: with_published(
        cluster, window, copying="stage"
    ),
    "auto": lambda cluster, window: with_auto(cluster, window),
}
COLORS = {"dynapipe": "#D55E00", "dynapipe, moved as ours": "#E69F00", "auto": "#0072B2"}


def compute(options: Options) -> list[Row]:
    rows = []
    for model, rate, policy in SETTINGS:
        cluster = Cluster(model=model, device="a100-40g-pcie")
        workload = load("sharegpt", rate, options)
        still = [
            served(with_removed(cluster, removed), workload, policy=policy)[0]
            for removed in REMOVED
        ]
        best = min(still, key=lambda row: float(row["e2e_ms"]))
        setting = {"setting": f"{model}, {policy}, {rate:g}/s"}
        rows.append(setting | {"rule": "best static", "window": 0} | best)
        rows.append(setting | {"rule": "even", "window": 0} | still[0])
        for rule, planned in RULES.items():
            for window in WINDOWS:
                row, _ = served(planned(cluster, window), workload, policy=policy)
                rows.append(setting | {"rule": rule, "window": window} | row)
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(11, 10)
    panels = canvas.subplots(len(SETTINGS), 2, squeeze=False)
    for line, (setting,) in zip(panels, distinct(rows, "setting"), strict=True):
        (best,) = select(rows, setting=setting, rule="best static")
        for panel, column, label in (
            (line[0], "e2e_ms", "mean E2E over the best static plan's"),
            (line[1], "num_moves", "moves"),
        ):
            for rule, color in COLORS.items():
                points = select(rows, setting=setting, rule=rule)
                unit = best["e2e_ms"] if column == "e2e_ms" else 1.0
                panel.plot(
                    [row["window"] for row in points],
                    [row[column] / unit for row in points],
                    label=rule,
                    marker="o",
                    markersize=4,
                    color=color,
                )
            panel.set_xscale("log")
            panel.set_xticks(WINDOWS, WINDOWS)
            panel.set_xlabel("window (steps)")
            panel.set_ylabel(label)
            panel.grid(alpha=0.3)
        line[0].set_title(setting, loc="left", fontsize=10)
    panels[0][0].legend(fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (setting,) in distinct(rows, "setting"):
        (best,) = select(rows, setting=setting, rule="best static")
        (even,) = select(rows, setting=setting, rule="even")
        lines.append(
            f"{setting}: even is {even['e2e_ms'] / best['e2e_ms'] - 1:+.1%} over the "
            f"best static plan {best['plan']}"
        )
        for rule in RULES:
            points = ", ".join(
                f"{row['window']}: {row['e2e_ms'] / best['e2e_ms'] - 1:+.1%} with "
                f"{row['num_moves']} moves"
                for row in select(rows, setting=setting, rule=rule)
            )
            lines.append(f"{setting}, {rule}, E2E against the best static plan by window: {points}")
    return lines


FIGURE = Figure(
    name="move_window",
    title="The window of the planner of layer moves, ShareGPT",
    claim="DynaPipe (D9, D10): too small a window costs 35 % E2E against the best static plan; 25 "
    "has 4 adjustments and equals it (32B).",
    assumptions="dynapipe as published: its rule, no price, no cooldown, pages beside the steps; "
    "moved as ours: the same moves by our stages' own time.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
