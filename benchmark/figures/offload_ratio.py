"""Decode throughput by the ratio of offloaded to local attention, and what bounds it."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure as Canvas

from benchmark.figures.apart import LONG_ANSWERS, System, apart, load, mean_tokens
from benchmark.figures.figure import Figure, Options, Row, change, distinct, load_panels, select
from sgl_pipeline.simulator.offload_setup import AttentionOffload

RATIOS = (0.2, 0.4, 0.6, 0.7, 0.8, 1.0, 1.3)
LOADS = (("sharegpt", 40.0), ("azure_conv", 20.0), (LONG_ANSWERS, 40.0))
# An executor with the decode card's own bandwidth and room: the largest gain that there can be.
IDEAL = AttentionOffload(bandwidth_share=1.0, lent_share=0.95, latency_s=0.0)
EXECUTORS = {"60 % of the bandwidth": AttentionOffload(), "all of it, no latency": IDEAL}
STYLE = {
    "60 % of the bandwidth": {"color": "#0072B2", "marker": "o"},
    "all of it, no latency": {"color": "#D55E00", "marker": "s"},
}
COLUMNS = (
    ("output_tokens_per_s", "output tokens/s"),
    ("tpot_ms", "mean TPOT (ms)"),
    ("requests_running", "requests that decode"),
)


def compute(options: Options) -> list[Row]:
    rows = []
    for name, rate in LOADS:
        workload = load(name, rate, options)
        tokens = mean_tokens(workload)
        plain = System(name="apart", apart=apart()).run(workload)
        rows.append({"load": name, "ratio": 0.0, "computed_bound": 0.0} | plain)
        for executor, offload in EXECUTORS.items():
            offload = replace(offload, mean_tokens=tokens, only_hidden=False)
            computed = apart(offload=offload).bound
            for ratio in RATIOS:
                setup = apart(offload=replace(offload, bound=ratio))
                row = System(name=executor, apart=setup).run(workload)
                rows.append({"load": name, "ratio": ratio, "computed_bound": computed} | row)
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    panels = load_panels(
        rows, canvas, COLUMNS, x_label="offloaded / local attention", inches=(13, 3.6)
    )
    for name, column, panel in panels:
        (plain,) = select(rows, load=name, system="apart")
        for executor, style in STYLE.items():
            points = [plain, *select(rows, load=name, system=executor)]
            ratios = [row["ratio"] for row in points]
            panel.plot(ratios, [row[column] for row in points], label=executor, **style)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for name, system in distinct(rows, "load", "system"):
        if system == "apart":
            continue
        (plain,) = select(rows, load=name, system="apart")
        points = select(rows, load=name, system=system)
        best = max(points, key=lambda row: row["output_tokens_per_s"])
        last = points[-1]
        lines.append(
            f"{name}, {system}: best at ratio {best['ratio']:g} (bound by the formulas "
            f"{best['computed_bound']:.2f}; {best['offloaded_share']:.0%} of requests are "
            f"offloaded): {change(best, plain, 'output_tokens_per_s')} tokens/s over "
            f"{plain['output_tokens_per_s']:.0f}, TPOT {change(best, plain, 'tpot_ms')} over "
            f"{plain['tpot_ms']:.0f} ms, mean TTFT {plain['ttft_ms'] / 1e3:.1f} s to "
            f"{best['ttft_ms'] / 1e3:.1f} s; {plain['requests_running']:.0f} requests decode at a "
            f"time without, {best['requests_running']:.0f} with it"
        )
        lines.append(
            f"{name}, {system}, ratio {last['ratio']:g}: "
            f"{change(last, plain, 'output_tokens_per_s')} tokens/s, TPOT "
            f"{change(last, plain, 'tpot_ms')}"
        )
    return lines


FIGURE = Figure(
    name="offload_ratio",
    title="Attention offload by its ratio, Llama-2-13B on two A100, one prefills and one decodes",
    claim="Adrenaline: 1.63 times the throughput (13B, ShareGPT), 1.57 to 1.68 times on "
    "OpenThoughts; the best ratio is about 70 % (ShareGPT) and 80 % (OpenThoughts), more hurts.",
    assumptions="products of the 13B are those of Qwen2.5-14B by their weights, its attention that "
    "of 8 KV heads and five times the batch. The executor has 20 % of the prefill card, with it 60 "
    "% of its bandwidth, and 80 % of its pool; prefill takes 1.25 times as long. A layer's rows "
    "take NVLink, 14 us each way. Requests arrive faster than either side serves them, and are "
    "offloaded up to the ratio by either condition of the paper's rule, hidden or not. The load of "
    "long answers is made up.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
