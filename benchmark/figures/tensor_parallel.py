"""Two cards as two pipeline stages, or as one stage of two tensor-parallel halves (G7)."""

from collections.abc import Sequence

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

MODEL, DEVICE, TRACE = "Qwen3-32B", "rtxpro6000", "sharegpt"
LAYOUTS = {
    "PP 2": Cluster(model=MODEL, device=DEVICE, num_stages=2),
    "TP 2": Cluster(model=MODEL, device=DEVICE, num_stages=1, tensor_parallel=2),
}
RATES_PER_S = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0)


def compute(options: Options) -> list[Row]:
    rows = []
    for rate in RATES_PER_S:
        workload = poisson(options.trace or TRACE, rate, options)
        for layout, cluster in LAYOUTS.items():
            simulation = run(cluster, ThrottleArgs(policy="throttle"), workload)
            rows.append({"rate_per_s": rate, "layout": layout, **numbers(simulation)})
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(13, 3.5)
    for panel, (column, label) in zip(canvas.subplots(1, len(COLUMNS)), COLUMNS, strict=True):
        for layout in LAYOUTS:
            points = select(rows, layout=layout)
            panel.plot(
                [row["rate_per_s"] for row in points],
                [row[column] for row in points],
                marker="o",
                markersize=4,
                label=layout,
            )
        panel.set_xlabel("requests a second")
        panel.set_ylabel(f"mean {label} (ms)" if column.endswith("_ms") else "output tokens/s")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (rate,) in distinct(rows, "rate_per_s"):
        (pipeline,) = select(rows, rate_per_s=rate, layout="PP 2")
        (tensor,) = select(rows, rate_per_s=rate, layout="TP 2")
        changes = ", ".join(f"{label} {change(pipeline, tensor, name)}" for name, label in COLUMNS)
        lines.append(f"{rate:g} req/s: PP 2 against TP 2: {changes}")
    return lines


FIGURE = Figure(
    name="tensor_parallel",
    title=f"Pipeline or tensor parallelism: {MODEL}, two RTX PRO 6000 on PCIe, {TRACE}",
    claim="gLLM (G7): SGLang's tensor parallelism is better at low rates within a node (L20, "
    "PCIe), and worse across nodes.",
    assumptions="Operators are measured; the all-reduce is modeled from the link (16 GB/s, 20 us, "
    "two passes a layer). Across nodes nothing is simulated.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
