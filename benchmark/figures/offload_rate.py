"""The gain of attention offload by the rate of requests, by both readings of its rule."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure as Canvas

from benchmark.figures.apart import LONG_ANSWERS, System, apart, load, mean_tokens
from benchmark.figures.figure import Figure, Options, Row, change, distinct, load_panels, select
from sgl_pipeline.simulator.offload_setup import AttentionOffload
from sgl_pipeline.throttle.attention_offload import Reading

LOADS = (
    ("azure_conv", (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)),
    (LONG_ANSWERS, (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)),
    ("sharegpt", (2.0, 8.0, 16.0)),
)
READINGS: tuple[Reading, ...] = ("either", "both")
STYLE = {
    "apart": {"color": "#999999", "marker": "^"},
    "either": {"color": "#0072B2", "marker": "o"},
    "both": {"color": "#D55E00", "marker": "s"},
}
COLUMNS = (
    ("output_tokens_per_s", "output tokens/s"),
    ("ttft_ms", "mean TTFT (ms)"),
    ("tpot_ms", "mean TPOT (ms)"),
    ("tpot_p99_ms", "p99 TPOT (ms)"),
)


def compute(options: Options) -> list[Row]:
    rows = []
    for name, rates in LOADS:
        for rate in rates:
            workload = load(name, rate, options)
            setting = {"load": name, "rate_per_s": rate}
            rows.append(setting | System(name="apart", apart=apart()).run(workload))
            offload = AttentionOffload(mean_tokens=mean_tokens(workload))
            for reading in READINGS:
                setup = apart(offload=replace(offload, reading=reading))
                rows.append(setting | System(name=reading, apart=setup).run(workload))
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    panels = load_panels(rows, canvas, COLUMNS, x_label="requests/s", inches=(15, 3.4))
    for name, column, panel in panels:
        for system, style in STYLE.items():
            points = select(rows, load=name, system=system)
            rates = [row["rate_per_s"] for row in points]
            panel.plot(rates, [row[column] for row in points], label=system, **style)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for name, rate in distinct(rows, "load", "rate_per_s"):
        (plain,) = select(rows, load=name, rate_per_s=rate, system="apart")
        parts = []
        for reading in READINGS:
            (row,) = select(rows, load=name, rate_per_s=rate, system=reading)
            parts.append(
                f"{reading} {row['offloaded_share']:.0%} offloaded, tokens/s "
                f"{change(row, plain, 'output_tokens_per_s')}, TTFT {row['ttft_ms']:.0f} ms "
                f"({plain['ttft_ms'] / row['ttft_ms']:.1f} times lower), TPOT "
                f"{change(row, plain, 'tpot_ms')}, p99 {change(row, plain, 'tpot_p99_ms')}"
            )
        lines.append(
            f"{name}, {rate:g}/s, apart: {plain['output_tokens_per_s']:.0f} tokens/s, TTFT "
            f"{plain['ttft_ms']:.0f} ms (prefill {plain['prefill_ms']:.0f}), TPOT "
            f"{plain['tpot_ms']:.1f} ms. " + "; ".join(parts)
        )
    return lines


FIGURE = Figure(
    name="offload_rate",
    title="Attention offload by rate, Llama-2-13B on two A100",
    claim="Adrenaline: no gain below 1.5 requests/s, where memory is not full; TTFT 22 times lower "
    "(7B), 5 times at 3.5 requests/s (13B), because fewer requests wait for decode memory; TPOT "
    "about equal on ShareGPT, p99 -48.5 to -58.8 % (7B, OpenThoughts).",
    assumptions="as in the figure offload_ratio, with the bound that the formulas give, and only "
    "what is hidden behind local attention.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
