"""Figure b: latency and throughput against request rate, for each policy, model, link and trace."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import (
    POLICY_STYLE,
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

# Models on the cards that hold them with room for KV, and rates up to beyond what they carry.
SETTINGS: tuple[tuple[str, str, dict[str, tuple[float, ...]]], ...] = (
    (
        "Qwen2.5-14B",
        "a100-40g-pcie",
        {"sharegpt": (4, 8, 16, 24, 32, 40), "azure_conv": (1, 2, 4, 6, 8, 10)},
    ),
    (
        "Qwen2.5-32B",
        "a100-40g-pcie",
        {"sharegpt": (2, 4, 8, 12, 16, 20), "azure_conv": (0.5, 1, 2, 3, 4, 6)},
    ),
    (
        "Llama-3.1-70B",
        "a100-80g",
        {"sharegpt": (2, 4, 6, 8, 10, 12), "azure_conv": (0.5, 1, 1.5, 2, 2.5, 3)},
    ),
)
LINKS = ("pcie", "net73")
POLICIES = ("throttle", "sarathi", "greedy-queue")
PANELS = (
    ("ttft_ms", "mean TTFT (ms)"),
    ("tpot_ms", "mean TPOT (ms)"),
    ("e2e_ms", "mean E2E (ms)"),
    ("output_tokens_per_s", "output tokens/s"),
)


def compute(options: Options) -> list[Row]:
    rows = []
    for model, device, rates_of in SETTINGS:
        for link in LINKS:
            cluster = Cluster(model=model, device=device, link=link)
            for trace, rates in rates_of.items():
                if options.trace is not None and trace != "azure_conv":
                    continue
                for rate in rates:
                    workload = poisson(options.trace or trace, rate, options)
                    for policy in POLICIES:
                        simulation = run(cluster, ThrottleArgs(policy=policy), workload)
                        rows.append(
                            {
                                "model": model,
                                "link": link,
                                "trace": options.trace or trace,
                                "rate_per_s": rate,
                                "policy": policy,
                                **numbers(simulation),
                            }
                        )
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    """A line of four panels for each model, trace and link."""
    settings = distinct(rows, "model", "trace", "link")
    canvas.set_size_inches(13, 2.6 * len(settings))
    panels = canvas.subplots(len(settings), len(PANELS), squeeze=False)
    for line, (model, trace, link) in zip(panels, settings, strict=True):
        for panel, (column, label) in zip(line, PANELS, strict=True):
            for policy in POLICIES:
                points = select(rows, model=model, trace=trace, link=link, policy=policy)
                panel.plot(
                    [row["rate_per_s"] for row in points],
                    [row[column] for row in points],
                    label=policy,
                    markersize=4,
                    **POLICY_STYLE[policy],
                )
            panel.set_xlabel("requests/s")
            panel.set_ylabel(label)
            if column != "output_tokens_per_s":
                panel.set_yscale("log")
            panel.grid(alpha=0.3)
        line[0].set_title(f"{model}, {trace}, {link}", loc="left", fontsize=10)
    panels[0][0].legend(fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    """The highest rate of each setting, throttle against sarathi."""
    lines = []
    for model, trace, link in distinct(rows, "model", "trace", "link"):
        rate = max(row["rate_per_s"] for row in select(rows, model=model, trace=trace, link=link))
        at_top = select(rows, model=model, trace=trace, link=link, rate_per_s=rate)
        (throttle,) = select(at_top, policy="throttle")
        (sarathi,) = select(at_top, policy="sarathi")
        changes = ", ".join(
            f"{label} {change(throttle, sarathi, column)}"
            for column, label in (
                ("output_tokens_per_s", "throughput"),
                ("ttft_ms", "TTFT"),
                ("tpot_ms", "TPOT"),
                ("e2e_ms", "E2E"),
            )
        )
        bubbles = f"bubbles {sarathi['bubble_share']:.0%} to {throttle['bubble_share']:.0%}"
        lines.append(f"{model}, {trace}, {link}, {rate:g} req/s: {changes}, {bubbles}")
    return lines


FIGURE = Figure(
    name="rates",
    title="Latency and throughput against request rate",
    claim="gLLM (G1 to G6): 11 to 398 % more throughput than vLLM (PP) and SGLang (TP), E2E slope "
    "0.14 to 0.92 times lower, the gain larger on ShareGPT than on Azure; none or a loss where "
    "prefill is abundant (Azure, 100B, 4 req/s).",
    assumptions="PP 4. Kernel times of A100-SXM (x 1.3 where memory-bound, for the 40 GB card); "
    "sampling assumed. All policies in the same runtime, so its gain over vLLM's is not in here.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
