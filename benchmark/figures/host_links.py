"""Throughput over hosts of one card each: bandwidth and delay of the links, number of hosts."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import UNBOUNDED, Figure, Options, Row, run, select
from benchmark.figures.scaling import steady_tokens_per_s
from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.host_network import HostLink, HostNetwork, PaperHost
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.workload import SimulatedRequest, poisson_arrivals

MODEL, DEVICE = "Qwen2.5-32B", "a100-40g-pcie"
GBIT_PER_S = (1.0, 10.0, 100.0)
DELAYS_MS = (0.1, 1.0, 10.0)
STAGES = (8, 16, 64)
EXTRA_STEPS = (0, 8)
_COLORS = {1.0: "#D55E00", 10.0: "#999999", 100.0: "#0072B2"}


def compute(options: Options) -> list[Row]:
    rows = []
    for stages in STAGES:
        workload = _workload(options, stages)
        ideal = _tokens_per_s(None, stages, 0, workload)
        for gbit_per_s in GBIT_PER_S:
            for delay_ms in DELAYS_MS:
                for extra in EXTRA_STEPS:
                    link = HostLink(gbit_per_s=gbit_per_s, delay_ms=delay_ms)
                    rate = _tokens_per_s(link, stages, extra, workload)
                    row = {"stages": stages, "gbit_per_s": gbit_per_s, "delay_ms": delay_ms}
                    row |= {"extra_steps": extra, "steady_tokens_per_s": rate}
                    rows.append(row | {"share_of_ideal": rate / ideal})
    return rows


def _workload(options: Options, stages: int) -> list[SimulatedRequest]:
    """All at once, as many for each stage, so that every depth is saturated alike."""
    count = options.num_requests * stages // STAGES[0]
    requests = load_trace(options.trace or "azure_conv", count)
    return poisson_arrivals(requests, float("inf"), Random(options.seed))


def _tokens_per_s(
    link: HostLink | None, stages: int, extra: int, workload: Sequence[SimulatedRequest]
) -> float:
    hosts = HostNetwork(
        hosts=tuple(PaperHost(name=f"host{rank}") for rank in range(stages)), link=link
    )
    cluster = Cluster(
        model=MODEL,
        device=DEVICE,
        link="ideal",
        num_stages=stages,
        hosts=None if link is None else hosts,
    )
    scheduling = replace(UNBOUNDED, extra_steps_in_flight=extra)
    return steady_tokens_per_s(run(cluster, ThrottleArgs(), workload, scheduling))


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(11, 3.8)
    for panel, stages in zip(canvas.subplots(1, len(STAGES), sharey=True), STAGES, strict=True):
        for gbit_per_s in GBIT_PER_S:
            for extra in EXTRA_STEPS:
                points = select(rows, stages=stages, gbit_per_s=gbit_per_s, extra_steps=extra)
                panel.plot(
                    [row["delay_ms"] for row in points],
                    [row["share_of_ideal"] for row in points],
                    color=_COLORS[gbit_per_s],
                    linestyle="--" if extra else "-",
                    marker="o",
                    label=f"{gbit_per_s:g} Gbit/s" + (f", {extra} more steps" if extra else ""),
                )
        panel.set_title(f"{stages} hosts", fontsize=10)
        panel.set_xscale("log")
        panel.set_ylim(bottom=0)
        panel.set_xlabel("delay between hosts, ms one way")
    panel.legend(fontsize=7)
    canvas.axes[0].set_ylabel("tokens/s, of what ideal links give")


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for stages in STAGES:
        for extra in EXTRA_STEPS:
            shares = ", ".join(
                f"{row['gbit_per_s']:g} Gbit/s and {row['delay_ms']:g} ms "
                f"{row['share_of_ideal']:.0%}"
                for row in select(rows, stages=stages, extra_steps=extra)
            )
            more = f", {extra} steps more in flight" if extra else ""
            lines.append(f"{stages} hosts{more}: {shares} of the throughput over ideal links")
    return lines


FIGURE = Figure(
    name="host_links",
    title=f"{MODEL} on hosts with one card each, against their links",
    claim="gLLM (G8) has nodes joined by 73 Gbit/s; it says nothing of slower links or of delay.",
    assumptions="Every request is there from the beginning; each hop between hosts has the delay, "
    "the results' way back too; layers are split evenly (64 layers: one a host at 64 hosts).",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
