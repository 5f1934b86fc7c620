"""Layers that move over the links that activations need, too: PCIe, and networks (TCP only)."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import Figure, Options, Row, change, distinct, select
from benchmark.figures.plans import load, served, with_auto, with_published, with_removed
from sgl_pipeline.simulator.experiment import Cluster

LINKS = ("pcie", "net73", "net10")
RATES = (16.0, 32.0)
SYSTEMS = {
    "even": lambda cluster: with_removed(cluster, 0),
    "two off the last": lambda cluster: with_removed(cluster, 2),
    "dynapipe": lambda cluster: with_published(cluster, shares_links=cluster.link != "pcie"),
    "auto": lambda cluster: with_auto(cluster, shares_links=cluster.link != "pcie"),
}
COLORS = {
    "even": "#999999",
    "two off the last": "#009E73",
    "dynapipe": "#D55E00",
    "auto": "#0072B2",
}


def compute(options: Options) -> list[Row]:
    rows = []
    for link in LINKS:
        cluster = Cluster(model="Qwen2.5-14B", device="a100-40g-pcie", link=link)
        for rate in RATES:
            for system, planned in SYSTEMS.items():
                row, simulation = served(planned(cluster), load("sharegpt", rate, options))
                prepared_s = [(move.switched_s or 0.0) - move.began_s for move in simulation.moves]
                setting = {"link": link, "rate_per_s": rate, "system": system}
                rows.append(setting | {"longest_copy_s": max(prepared_s, default=0.0)} | row)
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(10, 4)
    for panel, (rate,) in zip(canvas.subplots(1, 2), distinct(rows, "rate_per_s"), strict=True):
        for number, system in enumerate(SYSTEMS):
            points = select(rows, rate_per_s=rate, system=system)
            panel.bar(
                [place + 0.2 * number for place in range(len(points))],
                [row["e2e_ms"] * 1e-3 for row in points],
                width=0.18,
                label=system,
                color=COLORS[system],
            )
        panel.set_xticks([place + 0.3 for place in range(len(LINKS))], LINKS)
        panel.set_ylabel("mean E2E (s)")
        panel.set_title(f"{rate:g} requests/s", fontsize=10)
        panel.legend(fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for link, rate in distinct(rows, "link", "rate_per_s"):
        of = {row["system"]: row for row in select(rows, link=link, rate_per_s=rate)}
        changes = ", ".join(
            f"{name} {change(of[name], of['even'], 'e2e_ms')}" for name in list(SYSTEMS)[1:]
        )
        moves = "; ".join(
            f"{name}: {of[name]['num_moves']} moves, {of[name]['moved_mb']:.0f} MB, at most "
            f"{of[name]['longest_copy_s']:.2f} s of copying and {of[name]['longest_wait_ms']:.1f} "
            "ms that a step waited"
            for name in ("dynapipe", "auto")
        )
        lines.append(f"{link}, {rate:g}/s: mean E2E against even: {changes}. {moves}")
    return lines


FIGURE = Figure(
    name="move_links",
    title="Layers that move over slow links, Qwen2.5-14B, ShareGPT",
    claim="DynaPipe (D11, D14): over TCP the gain on gLLM is slightly smaller than in the node, "
    "about 24 % (second-hand); a layer costs less than 100 ms beyond its step over PCIe, mostly "
    "hidden.",
    assumptions="net73 is gLLM's network (73.28 Gbps), net10 a 10 Gbps one; both carry pages and "
    "activations alike, PCIe does not. dynapipe copies beside its steps, with resident weights; "
    "auto copies in its stages' own time and reads weights at 20.79 GB/s.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
