"""A stage that slows down by 30 % half way: what moving layers away from it recovers."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import Figure, Options, Row, closed_loop, select
from benchmark.figures.plans import made_up, plan_text, served, with_auto, with_published
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.stage_clock import Slowdown

CLIENTS = 192
SLOW_STAGE, FACTOR = 1, 1.3
WINDOW_S = 2.0
SYSTEMS = {
    "even": lambda cluster: cluster,
    "dynapipe": with_published,
    "auto": with_auto,
    "auto, costs learned": lambda cluster: with_auto(replace(cluster, forecast="online")),
}
COLORS = {
    "even": "#999999",
    "dynapipe": "#D55E00",
    "auto": "#0072B2",
    "auto, costs learned": "#56B4E9",
}


def compute(options: Options) -> list[Row]:
    healthy = Cluster(model="Qwen2.5-14B", device="a100-40g-pcie")
    workload = closed_loop(made_up(4 * options.num_requests, 223, 155), CLIENTS)
    _, simulation = served(healthy, workload)
    half_s = simulation.steps[-1].ends_s[-1] / 2
    slow = replace(healthy, slowdowns=(Slowdown(stage=SLOW_STAGE, from_s=half_s, factor=FACTOR),))
    rows = []
    for system, planned in SYSTEMS.items():
        row, simulation = served(planned(slow), workload)
        moves = [
            {"began_s": move.began_s, "ended_s": move.ended_s, "plan": plan_text(move.after)}
            for move in simulation.moves
        ]
        series = tokens_per_s(simulation)
        rows.append(
            {"system": system, "slow_from_s": half_s, "moves": moves, "series": series} | row
        )
    return rows


def tokens_per_s(simulation: Simulation) -> list[float]:
    """Tokens computed in each window, prompt and output, a second; the last one is left out."""
    end_s = simulation.steps[-1].ends_s[-1]
    sums = [0.0] * (int(end_s / WINDOW_S) + 1)
    for step in simulation.steps:
        sums[int(step.ends_s[-1] / WINDOW_S)] += step.shape.num_tokens / WINDOW_S
    return sums[:-1]


def levels(row: Row) -> tuple[float, float, float | None]:
    """Tokens a second before the stage slows down, at the end, and the seconds from then until the
    mean over three windows first is within 5 % of the latter."""
    series, first = row["series"], int(row["slow_from_s"] / WINDOW_S) + 1
    before = series[first - 12 : first - 1]
    # Clients that have nothing left to ask thin the last windows out.
    end = series[-16:-6]
    before_mean, end_mean = sum(before) / len(before), sum(end) / len(end)
    for place in range(first, len(series) - 2):
        if sum(series[place : place + 3]) / 3 >= 0.95 * end_mean:
            return before_mean, end_mean, place * WINDOW_S - row["slow_from_s"]
    return before_mean, end_mean, None


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(9, 4)
    panel = canvas.subplots()
    for row in rows:
        times_s = [WINDOW_S * (place + 0.5) for place in range(len(row["series"]))]
        system = row["system"]
        panel.plot(times_s, row["series"], label=system, color=COLORS[system], linewidth=1.2)
        if system == "auto":
            for move in row["moves"]:
                panel.axvline(move["began_s"], color=COLORS[system], linewidth=0.6, linestyle=":")
    panel.axvline(rows[0]["slow_from_s"], color="black", linewidth=0.8)
    panel.set_xlabel("seconds")
    panel.set_ylabel("tokens/s, prompt and output")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    (even,) = select(rows, system="even")
    _, even_end, _ = levels(even)
    lines = []
    for row in rows:
        before, end, seconds = levels(row)
        took = "never" if seconds is None else f"within {seconds:.0f} s"
        moves = ", ".join(
            f"{move['plan']} at {move['began_s'] - row['slow_from_s']:+.1f} s"
            for move in row["moves"]
        )
        lines.append(
            f"{row['system']}: {before:.0f} tokens/s before, {end:.0f} at the end "
            f"({end / before:.0%} of its own before, {end / even_end - 1:+.0%} on even), there "
            f"{took}; moves: {moves or 'none'}"
        )
    return lines


FIGURE = Figure(
    name="slow_stage",
    title="Stage 1 of 4 slows down by 30 % half way, Qwen2.5-14B",
    claim="not in the papers: DynaPipe's rule knows sampling and layers, not stages that differ.",
    assumptions=f"{CLIENTS} clients that ask again when answered, ShareGPT's mean lengths. A stage "
    "that slows down takes 1.3 times as long for each step.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
