"""Four cards as mixed pipelines, as prefill and decode apart, and with attention offload: when is
which best?"""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure as Canvas

from benchmark.figures.apart import LONG_ANSWERS, System, apart, load, mean_tokens
from benchmark.figures.figure import Figure, Options, Row, distinct, select
from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.simulator.offload_setup import AttentionOffload

NUM_DEVICES = 4
TARGET = LatencyTarget(ttft_ms=1000.0, tpot_ms=60.0)
# Requests a second: far from what four cards carry, near it, beyond it.
LOADS = (
    ("sharegpt", (8.0, 24.0, 40.0)),
    ("azure_conv", (2.0, 6.0, 10.0)),
    ("azure_code", (2.0, 6.0, 10.0)),
    (LONG_ANSWERS, (1.0, 3.0, 5.0)),
)
MIXED = (
    System(name="4 mixed", mixed_pipelines=4),
    System(name="2 mixed, PP 2", mixed_pipelines=2, mixed_stages=2),
    System(name="1 mixed, PP 4", mixed_pipelines=1, mixed_stages=4),
)
OFFLOAD = AttentionOffload()
APART = (
    System(name="3 P, 1 D", apart=apart((3, 1))),
    System(name="2 P, 2 D", apart=apart((2, 2))),
    System(name="1 P, 3 D", apart=apart((1, 3))),
    System(name="1 P, 1 D, PP 2", apart=apart((1, 1), (2, 2))),
)
LENDING = (
    System(name="2 P, 2 D, offload", apart=apart((2, 2), offload=OFFLOAD)),
    System(name="1 P, 3 D, offload", apart=apart((1, 3), offload=OFFLOAD)),
)
COLORS = (
    "#56B4E9",
    "#0072B2",
    "#004466",
    "#F0C9A8",
    "#E69F00",
    "#D55E00",
    "#8C3A00",
    "#66C2A5",
    "#009E73",
)
COLUMNS = (
    ("goodput_per_device", "requests/s in target, per card"),
    ("ttft_p99_ms", "p99 TTFT (ms)"),
    ("itl_p99_ms", "p99 between tokens (ms)"),
)
# Goodputs that differ by less are equal; the lower tail between tokens decides.
TIE = 0.02


def compute(options: Options) -> list[Row]:
    rows = []
    for name, rates in LOADS:
        for rate in rates:
            workload = load(name, rate, options)
            tokens = mean_tokens(workload)
            for system in (*MIXED, *APART, *LENDING):
                row = {"load": name, "rate_per_s": rate}
                rows.append(row | _knows(system, tokens).run(workload, TARGET))
    return rows


def _knows(system: System, tokens: int) -> System:
    """`system`, whose offload bound is for requests of so many tokens."""
    if system.apart is None or system.apart.offload is None:
        return system
    offload = replace(system.apart.offload, mean_tokens=tokens)
    return replace(system, apart=replace(system.apart, offload=offload))


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    loads = distinct(rows, "load")
    canvas.set_size_inches(15, 3.6 * len(loads))
    panels = canvas.subplots(len(loads), len(COLUMNS), squeeze=False)
    systems = [system for (system,) in distinct(rows, "system")]
    width = 0.8 / len(systems)
    for (name,), line in zip(loads, panels, strict=True):
        rates = [rate for (rate,) in distinct(select(rows, load=name), "rate_per_s")]
        for panel, (column, label) in zip(line, COLUMNS, strict=True):
            for number, (system, color) in enumerate(zip(systems, COLORS, strict=True)):
                points = select(rows, load=name, system=system)
                places = [place + number * width for place in range(len(rates))]
                heights = [row[column] for row in points]
                panel.bar(places, heights, width, label=system, color=color)
            panel.set_xticks([place + 0.4 - width / 2 for place in range(len(rates))])
            panel.set_xticklabels([f"{rate:g}/s" for rate in rates])
            panel.set_ylabel(label)
            panel.set_title(name, fontsize=10)
            panel.grid(axis="y", alpha=0.3)
            if column != "goodput_per_device":
                panel.set_yscale("log")
    panels[0][0].legend(fontsize=7)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for name, rate in distinct(rows, "load", "rate_per_s"):
        cell = select(rows, load=name, rate_per_s=rate)
        best = max(row["goodput_per_device"] for row in cell)
        equal = [row for row in cell if row["goodput_per_device"] >= (1 - TIE) * best]
        first = min(equal, key=lambda row: row["itl_p99_ms"])
        kinds = []
        for kind, systems in (("mixed", MIXED), ("apart", APART), ("with offload", LENDING)):
            names = {system.name for system in systems}
            own = [row for row in cell if row["system"] in names]
            top = max(own, key=lambda row: (row["goodput_per_device"], -row["itl_p99_ms"]))
            kinds.append(f"{kind} at best {top['system']}: {_row_text(top)}")
        lines.append(f"{name}, {rate:g}/s, best is {first['system']}. " + "; ".join(kinds))
    return lines


def _row_text(row: Row) -> str:
    return (
        f"{row['goodput_per_device']:.2f}/s in target on a card, TTFT p99 "
        f"{row['ttft_p99_ms']:.0f} ms, TPOT {row['tpot_ms']:.0f} ms, between tokens p99 "
        f"{row['itl_p99_ms']:.0f} ms, {row['output_tokens_per_s']:.0f} tokens/s"
    )


FIGURE = Figure(
    name="disaggregation",
    title=f"{NUM_DEVICES} cards: mixed, prefill and decode apart, attention offload; Llama-2-13B",
    claim='vLLM on prefill and decode apart: it "does not improve throughput", it keeps tails '
    "between tokens. Adrenaline: 1.47 to 1.68 times the throughput of prefill and decode apart.",
    assumptions=f"in target means a first token within {TARGET.ttft_ms:.0f} ms and "
    f"{TARGET.tpot_ms:.0f} ms a token. Mixed pipelines and decode servers have gLLM's throttle, "
    "prefill servers a fixed budget of 2,048 tokens. NVLink between all cards; the router knows "
    "every queue. Offload as in the figure offload_rate. Best is the most requests in target; "
    f"within {TIE:.0%} of it, the lowest p99 between tokens.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
