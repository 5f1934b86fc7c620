"""Figure f: what each parameter of the throttle does, the others at their defaults."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import (
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

SETTING = ("Qwen2.5-32B", "a100-40g-pcie", "azure_conv", 5.0)
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
COLUMNS = (
    ("ttft_ms", "TTFT"),
    ("tpot_ms", "TPOT"),
    ("e2e_ms", "E2E"),
    ("output_tokens_per_s", "throughput"),
)


def compute(options: Options) -> list[Row]:
    model, device, trace, rate = SETTING
    cluster = Cluster(model=model, device=device, link="net73")
    workload = poisson(options.trace or trace, rate, options)
    rows = []
    for parameter, values in SWEEPS.items():
        for value in values:
            throttle = replace(ThrottleArgs(), **{parameter: value})
            simulation = run(cluster, throttle, workload)
            rows.append({"parameter": parameter, "value": value, **numbers(simulation)})
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    """Each quantity relative to the first value of its sweep."""
    canvas.set_size_inches(13, 3.5)
    parameters = distinct(rows, "parameter")
    for panel, (parameter,) in zip(
        canvas.subplots(1, len(parameters), squeeze=False)[0], parameters, strict=True
    ):
        points = select(rows, parameter=parameter)
        places = range(len(points))
        for column, label in COLUMNS:
            relative = [row[column] / points[0][column] for row in points]
            panel.plot(places, relative, marker="o", markersize=4, label=label)
        panel.set_xticks(places, [row["value"] for row in points])
        panel.set_xlabel(f"{parameter} ({PAPER_NAMES[parameter]})")
        panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (parameter,) in distinct(rows, "parameter"):
        first, *others = select(rows, parameter=parameter)
        for row in others:
            changes = ", ".join(f"{label} {change(row, first, name)}" for name, label in COLUMNS)
            lines.append(f"{PAPER_NAMES[parameter]} {first['value']} to {row['value']}: {changes}")
    return lines


FIGURE = Figure(
    name="sensitivity",
    title=f"Parameters of the throttle: {SETTING[0]}, PP 4, {SETTING[2]} at {SETTING[3]:g} req/s",
    claim="gLLM (G16 to G19): #T 1 to 4 leaves TTFT flat and betters the rest, larger raises TTFT; "
    "#MaxP 512 costs throughput, larger trades TPOT for TTFT; KVthresh 0 slightly worse; #MinP "
    "below 2 %.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
