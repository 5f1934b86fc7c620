"""Figure f: what each parameter of the throttle does, the others at their defaults."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import (
    COLUMNS,
    Figure,
    Options,
    Row,
    change,
    distinct,
    numbers,
    poisson,
    run,
    select,
)
from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster

MODEL, TRACE, RATE_PER_S = "Qwen2.5-32B", "azure_conv", 5.0
# Shares of the card's memory for weights and KV: with the smaller one KV is what runs short.
MEMORY_SHARES = {"ample KV": 0.9, "scarce KV": 0.55}
SWEEPS: dict[str, tuple[Any, ...]] = {
    "prefill_spread_steps": (1, 2, 4, 8, 16, 32),
    "max_prefill_tokens": (512, 1024, 2048, 4096),
    "pause_free_share": (0.0, 0.05, 0.1, 0.2),
    "min_prefill_tokens": (8, 16, 32, 64, 128),
}
PAPER_NAMES = {
    "prefill_spread_steps": "#T",
    "max_prefill_tokens": "#MaxP",
    "pause_free_share": "KVthresh",
    "min_prefill_tokens": "#MinP",
}


def compute(options: Options) -> list[Row]:
    workload = poisson(options.trace or TRACE, RATE_PER_S, options)
    rows = []
    for memory, memory_share in MEMORY_SHARES.items():
        cluster = Cluster(
            model=MODEL, device="a100-40g-pcie", link="net73", memory_share=memory_share
        )
        for parameter, values in SWEEPS.items():
            for value in values:
                throttle = replace(ThrottleArgs(policy="throttle"), **{parameter: value})
                simulation = run(cluster, throttle, workload)
                setting = {"memory": memory, "parameter": parameter, "value": value}
                rows.append(setting | numbers(simulation))
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    """Each quantity relative to the first value of its sweep."""
    canvas.set_size_inches(13, 6.5)
    panels = canvas.subplots(len(MEMORY_SHARES), len(SWEEPS))
    for line, memory in zip(panels, MEMORY_SHARES, strict=True):
        for panel, parameter in zip(line, SWEEPS, strict=True):
            points = select(rows, memory=memory, parameter=parameter)
            places = range(len(points))
            for column, label in COLUMNS:
                relative = [row[column] / points[0][column] for row in points]
                panel.plot(places, relative, marker="o", markersize=4, label=label)
            panel.set_xticks(places, [row["value"] for row in points])
            panel.set_xlabel(f"{parameter} ({PAPER_NAMES[parameter]})")
            panel.grid(alpha=0.3)
        line[0].set_ylabel(f"{memory}: relative to the first")
    panels[0][-1].legend(fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for memory, parameter in distinct(rows, "memory", "parameter"):
        first, *others = select(rows, memory=memory, parameter=parameter)
        for row in others:
            changes = ", ".join(f"{label} {change(row, first, name)}" for name, label in COLUMNS)
            lines.append(
                f"{memory}: {PAPER_NAMES[parameter]} {first['value']} to {row['value']}: {changes}"
            )
    return lines


FIGURE = Figure(
    name="sensitivity",
    title=f"Parameters of the throttle: {MODEL}, PP 4, {TRACE} at {RATE_PER_S:g} req/s",
    claim="gLLM (G16 to G19): #T 1 to 4 leaves TTFT flat and betters the rest, larger raises TTFT; "
    "#MaxP 512 costs throughput, larger trades TPOT for TTFT; KVthresh 0 slightly worse; #MinP "
    "below 2 %.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
