"""Attention offload by the latency of its link, at two depths, with waits that others fill."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure as Canvas

from benchmark.figures.apart import System, apart, load, mean_tokens
from benchmark.figures.figure import Figure, Options, Row, change, distinct, select
from sgl_pipeline.simulator.offload_setup import AttentionOffload

# Milliseconds of a layer's rows each way; the first is NVLink's.
LATENCIES_MS = (0.014, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0)
DEPTHS = (1, 2)
LOAD, RATE_PER_CARD = "azure_conv", 20.0
# Name, requests that would wait are declined, waits are filled, further steps in flight for each
# stage.
SYSTEMS = (
    ("waits", False, False, 0),
    ("only what is hidden", True, False, 0),
    ("waits, twice the steps", False, False, 1),
    ("others fill the waits", False, True, 1),
)
STYLE = {
    "waits": {"color": "#D55E00", "marker": "s"},
    "only what is hidden": {"color": "#009E73", "marker": "D"},
    "waits, twice the steps": {"color": "#999999", "marker": "^"},
    "others fill the waits": {"color": "#0072B2", "marker": "o"},
}
COLUMNS = (("output_tokens_per_s", "output tokens/s"), ("tpot_ms", "mean TPOT (ms)"))


def compute(options: Options) -> list[Row]:
    rows = []
    for depth in DEPTHS:
        # As many for each card, so that memory is as full.
        requests = replace(options, num_requests=options.num_requests * depth)
        workload = load(LOAD, RATE_PER_CARD * depth, requests)
        tokens = mean_tokens(workload)
        for steps in (0, 1):
            setup = apart(stages=(depth, depth), extra_steps=steps * depth)
            plain = System(name="apart" if not steps else "apart, twice the steps", apart=setup)
            rows.append({"depth": depth, "latency_ms": 0.0} | plain.run(workload))
        for name, only_hidden, fills, steps in SYSTEMS:
            for latency_ms in LATENCIES_MS:
                offload = AttentionOffload(
                    latency_s=latency_ms * 1e-3,
                    mean_tokens=tokens,
                    only_hidden=only_hidden,
                    fills_waits=fills,
                )
                setup = apart(stages=(depth, depth), offload=offload, extra_steps=steps * depth)
                row = {"depth": depth, "latency_ms": latency_ms}
                rows.append(row | System(name=name, apart=setup).run(workload))
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(10, 3.2 * len(DEPTHS))
    panels = canvas.subplots(len(DEPTHS), len(COLUMNS), squeeze=False)
    for depth, line in zip(DEPTHS, panels, strict=True):
        for panel, (column, label) in zip(line, COLUMNS, strict=True):
            for system, style in STYLE.items():
                points = select(rows, depth=depth, system=system)
                latencies = [row["latency_ms"] for row in points]
                panel.plot(latencies, [row[column] for row in points], label=system, **style)
            for system, dashes in (("apart", "--"), ("apart, twice the steps", ":")):
                (row,) = select(rows, depth=depth, system=system)
                panel.axhline(row[column], color="#999999", linestyle=dashes, label=system)
            panel.set_xscale("log")
            panel.set_xlabel("latency of a layer's rows, each way (ms)")
            panel.set_ylabel(label)
            panel.set_ylim(bottom=0)
            panel.set_title(f"{depth} stages" if depth > 1 else "one stage", fontsize=10)
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for depth, system in distinct(rows, "depth", "system"):
        (plain,) = select(rows, depth=depth, system="apart")
        points = select(rows, depth=depth, system=system)
        if system == "apart":
            lines.append(
                f"depth {depth}, apart: {plain['output_tokens_per_s']:.0f} tokens/s, TPOT "
                f"{plain['tpot_ms']:.0f} ms"
            )
            continue
        gains = ", ".join(
            f"{row['latency_ms']:g} ms {change(row, plain, 'output_tokens_per_s')} (TPOT "
            f"{change(row, plain, 'tpot_ms')}, {row['offloaded_share']:.0%} offloaded)"
            for row in points
        )
        lines.append(f"depth {depth}, {system}, tokens/s over apart: {gains}")
    return lines


FIGURE = Figure(
    name="offload_latency",
    title="Attention offload by the latency of its link, Llama-2-13B, as many cards on each side",
    claim="Adrenaline: 0.5 ms a layer on a bad path is 16 ms a step at 32 layers; the gain needs a "
    "fast link. Ours, before this figure: on a pipeline other microbatches fill the waits.",
    assumptions="as in the figure offload_ratio, with the bound that the formulas give; requests "
    "of Azure's conversations come faster than either side serves them, as many for each card. A "
    "stage waits in every layer. Where others fill the waits, it holds two steps and switches "
    "between them at no cost; there are twice as many steps, each of half the decodes.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
