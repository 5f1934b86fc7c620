"""Figure d: the share of requests that meet a latency target, against request rate."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import (
    POLICY_STYLE,
    Figure,
    Options,
    Row,
    distinct,
    numbers,
    poisson,
    run,
    select,
)
from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.simulator.experiment import Cluster

# DynaPipe's targets for ShareGPT as quoted in summaries; twice them for Azure's longer prompts, and
# those of the 32B model for the 70B one: gLLM's own thresholds are not published.
SETTINGS: tuple[tuple[str, str, str, tuple[float, float], tuple[float, ...]], ...] = (
    ("Qwen2.5-14B", "a100-40g-pcie", "sharegpt", (1000, 100), (8, 16, 20, 24, 28, 32, 36, 40)),
    ("Qwen2.5-32B", "a100-40g-pcie", "sharegpt", (4000, 250), (8, 12, 16, 18, 20, 22, 24, 28)),
    ("Qwen2.5-32B", "a100-40g-pcie", "azure_conv", (4000, 150), (1, 2, 3, 4, 5, 6, 7, 8)),
    ("Llama-3.1-70B", "a100-80g", "azure_conv", (4000, 250), (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4)),
)
POLICIES = ("throttle", "sarathi", "greedy-queue")
NEEDED_SHARE = 0.8


def compute(options: Options) -> list[Row]:
    rows = []
    for model, device, trace, (ttft_ms, tpot_ms), rates in SETTINGS:
        cluster = Cluster(model=model, device=device, link="net73")
        target = LatencyTarget(ttft_ms=ttft_ms, tpot_ms=tpot_ms)
        setting = f"{model}, {options.trace or trace}, TTFT {ttft_ms} ms, TPOT {tpot_ms} ms"
        for rate in rates:
            workload = poisson(options.trace or trace, rate, options)
            for policy in POLICIES:
                simulation = run(cluster, ThrottleArgs(policy=policy), workload)
                row = {"setting": setting, "rate_per_s": rate, "policy": policy}
                rows.append(row | numbers(simulation, target))
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(11, 7)
    settings = distinct(rows, "setting")
    panels = canvas.subplots(-(-len(settings) // 2), 2, squeeze=False)
    for panel, (setting,) in zip(panels.flat, settings, strict=False):
        for policy in POLICIES:
            points = select(rows, setting=setting, policy=policy)
            panel.plot(
                [row["rate_per_s"] for row in points],
                [100 * row["target_share"] for row in points],
                label=policy,
                **POLICY_STYLE[policy],
            )
        panel.axhline(100 * NEEDED_SHARE, color="black", linewidth=0.6)
        panel.set_title(setting, fontsize=9)
        panel.set_xlabel("requests/s")
        panel.set_ylabel("requests within the target (%)")
    panels.flat[0].legend(fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (setting,) in distinct(rows, "setting"):
        carried = {
            policy: rate_at(select(rows, setting=setting, policy=policy), NEEDED_SHARE)
            for policy in POLICIES
        }
        gain = carried["throttle"] / carried["sarathi"] - 1 if carried["sarathi"] else float("nan")
        rates = ", ".join(f"{policy} {rate:.1f}" for policy, rate in carried.items())
        lines.append(f"{setting}: req/s at {NEEDED_SHARE:.0%} attainment {rates} ({gain:+.0%})")
    return lines


def rate_at(points: Sequence[Row], share: float) -> float:
    """The rate at which the line through the points first falls below `share`; the last rate if it
    never does, 0 if it starts below."""
    before: Row | None = None
    for row in points:
        if row["target_share"] < share:
            if before is None:
                return 0.0
            drop = before["target_share"] - row["target_share"]
            part = (before["target_share"] - share) / drop
            return float(before["rate_per_s"] + part * (row["rate_per_s"] - before["rate_per_s"]))
        before = row
    return float(points[-1]["rate_per_s"])


FIGURE = Figure(
    name="targets",
    title="Attainment of latency targets against request rate, PP 4",
    claim="gLLM (G10 to G12): 64 % more SLO coverage and 79 % more rate at 80 % attainment than "
    "vLLM (100B, 4 x A800, across nodes); slightly less at low rates.",
    assumptions="The targets (gLLM prints none), and 70B on A100-80G in place of 100B on A800.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
