"""Figure e: throttling without each of its parts, and Sarathi's policy in the same runtime."""

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

POLICIES = ("throttle", "no-wt", "no-ut", "no-threshold", "throttle-adaptive", "sarathi")
# (model, trace, requests a second, share of the card's memory): near what throttling carries, and
# once with so little memory that KV is what runs short.
SETTINGS = (
    ("Qwen2.5-14B", "azure_conv", 10.0, 0.9),
    ("Qwen2.5-32B", "sharegpt", 24.0, 0.9),
    ("Qwen2.5-32B", "azure_conv", 6.0, 0.9),
    ("Qwen2.5-32B", "azure_conv", 6.0, 0.55),
)


def compute(options: Options) -> list[Row]:
    rows = []
    for model, trace, rate, memory_share in SETTINGS:
        cluster = Cluster(
            model=model, device="a100-40g-pcie", link="net73", memory_share=memory_share
        )
        workload = poisson(options.trace or trace, rate, options)
        for policy in POLICIES:
            simulation = run(cluster, ThrottleArgs(policy=policy), workload)
            pool = f"{cluster.kv_pool_tokens() / 1000:.0f}k tokens of KV"
            setting = f"{model}, {options.trace or trace}, {rate:g} req/s, {pool}"
            rows.append({"setting": setting, "policy": policy, **numbers(simulation)})
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(15, 4)
    settings = distinct(rows, "setting")
    for panel, (setting,) in zip(
        canvas.subplots(1, len(settings), squeeze=False)[0], settings, strict=True
    ):
        (full,) = select(rows, setting=setting, policy="throttle")
        width = 0.8 / len(POLICIES)
        for number, policy in enumerate(POLICIES):
            (row,) = select(rows, setting=setting, policy=policy)
            places = [place + number * width for place in range(len(COLUMNS))]
            heights = [row[column] / full[column] for column, _ in COLUMNS]
            panel.bar(places, heights, width=width, label=policy)
        panel.axhline(1.0, color="black", linewidth=0.6)
        panel.set_xticks([place + 0.35 for place in range(len(COLUMNS))], [n for _, n in COLUMNS])
        panel.set_ylabel("relative to throttle")
        panel.set_title(setting, fontsize=8)
    panel.legend(fontsize=7)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (setting,) in distinct(rows, "setting"):
        (full,) = select(rows, setting=setting, policy="throttle")
        for policy in POLICIES[1:]:
            (row,) = select(rows, setting=setting, policy=policy)
            changes = ", ".join(f"{label} {change(row, full, name)}" for name, label in COLUMNS)
            retractions = f"{full['num_retractions']} to {row['num_retractions']} retractions"
            lines.append(f"{setting}: {policy} against throttle: {changes}; {retractions}")
    return lines


FIGURE = Figure(
    name="ablations",
    title="Throttling without its parts, PP 4",
    claim="gLLM (G13 to G15, figure 15): without WT TTFT -10 %, TPOT +44 %, E2E +20 %; without UT "
    "+22 %, +91 %, +38 %; without the threshold slightly worse.",
    assumptions="The paper names neither model nor rate of its figure 15.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
