"""The throttle by time against the throttle by tokens: every model, card, depth and trace."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from matplotlib.figure import Figure as Canvas

from benchmark.figures.bubbles import CAUSES, bubble_causes
from benchmark.figures.figure import Figure, Options, Row, distinct, numbers, run, select
from benchmark.figures.plans import plan_text
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.simulation import SimulatedStep, Simulation
from sgl_pipeline.simulator.summary import summarize
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.workload import SimulatedRequest, poisson_arrivals

MACHINES = (
    ("Qwen2.5-14B", "a100-80g"),
    ("Qwen2.5-32B", "h200"),
    ("Llama-3.1-70B", "h200"),
    ("Qwen3-32B", "rtxpro6000"),
)
DEPTHS = (2, 4, 8)
TRACES = ("sharegpt", "azure_conv", "azure_code", "mooncake_conversation", "arxiv_summarization")
# Of the requests a second that the token throttle carries when all come at once.
LOADS = (0.6, 1.0)
POLICIES = ("throttle", "throttle-time")
MOST_REQUESTS = 300
# Long prompts and answers make many steps: a hundred of these requests are some 5,000 of them.
MOST_LONG_REQUESTS = {"mooncake_conversation": 100, "arxiv_summarization": 200}
SCHEDULING = SchedulingArgs(max_running_requests=1024)
# Of the time up to the last arrival: without filling up and running out.
WINDOW = (0.15, 0.95)
# Worse than the token throttle by more than this is named.
TOLERANCE = 0.01
AIMS = {4: 0.05, 8: 0.08}
MEANS = (("total_tokens_per_s", "throughput"), ("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"))
TAILS = (("ttft_p99_ms", "p99 TTFT"), ("tpot_p99_ms", "p99 TPOT"))
KEYS = ("model", "device", "depth", "trace", "load")


def compute(options: Options) -> list[Row]:
    traces = (options.trace,) if options.trace is not None else TRACES
    rows = []
    for model, device in MACHINES:
        for depth in DEPTHS:
            cluster = Cluster(model=model, device=device, num_stages=depth, split="auto")
            for trace in traces:
                setting = {"model": model, "device": device, "depth": depth, "trace": trace}
                setting |= {"plan": plan_text(cluster.layers)}
                rows += [setting | row for row in _cell(cluster, trace, options)]
    return rows


def _cell(cluster: Cluster, trace: str, options: Options) -> Iterator[Row]:
    """Both policies at each load."""
    most = MOST_LONG_REQUESTS.get(trace, MOST_REQUESTS)
    requests = load_trace(trace, min(options.num_requests, most))

    def served(policy: str, rate_per_s: float) -> Simulation:
        workload: list[SimulatedRequest] = poisson_arrivals(
            requests, rate_per_s, Random(options.seed)
        )
        return run(cluster, ThrottleArgs(policy=policy), workload, SCHEDULING)

    capacity = summarize(served("throttle", float("inf"))).requests_per_s
    for load in LOADS:
        for policy in POLICIES:
            simulation = served(policy, load * capacity)
            yield {
                "load": load,
                "rate_per_s": load * capacity,
                "policy": policy,
                **numbers(simulation),
                **bubbles(arrival_window(simulation), cluster),
            }


def arrival_window(simulation: Simulation) -> list[SimulatedStep]:
    """The steps within `WINDOW`."""
    last_s = max(served.arrival_s for served in simulation.requests)
    first_s, end_s = (share * last_s for share in WINDOW)
    return [
        step
        for step in simulation.steps
        if step.starts_s[0] >= first_s and step.ends_s[-1] <= end_s
    ]


def bubbles(steps: Sequence[SimulatedStep], cluster: Cluster) -> Row:
    """The idle share of the stages over these steps, by cause as well, and its floor: what would be
    left if every step took what the mean one takes."""
    if not steps:
        return {"window_steps": 0, "bubbles": float("nan"), "floor": float("nan")}
    waited_s, until_s = 0.0, steps[0].starts_s[0]
    for step in steps:
        # No stage had anything to do.
        waited_s += max(0.0, step.starts_s[0] - until_s)
        until_s = max(until_s, step.ends_s[-1])
    stages = range(len(steps[0].starts_s))
    spans_s = [steps[-1].ends_s[i] - steps[0].starts_s[i] - waited_s for i in stages]
    busy_s = [sum(step.ends_s[i] - step.starts_s[i] for step in steps) for i in stages]
    return {
        "window_steps": len(steps),
        "bubbles": 1.0 - sum(busy_s) / sum(spans_s),
        "floor": 1.0 - sum(busy_s) / (len(busy_s) * max(busy_s)),
        **bubble_causes([step.shape for step in steps], cluster.costs()),
    }


def pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Token and time throttle of each cell."""
    return [
        (
            select(rows, **dict(zip(KEYS, cell, strict=True)), policy=POLICIES[0])[0],
            select(rows, **dict(zip(KEYS, cell, strict=True)), policy=POLICIES[1])[0],
        )
        for cell in distinct(rows, *KEYS)
    ]


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    """Ratios by trace and depth above, bubbles below."""
    canvas.set_size_inches(17, 12)
    panels = canvas.subplots(3, 3)
    places = {cell: at for at, cell in enumerate(distinct(rows, "depth", "trace"))}
    for panel, (column, label) in zip(panels.flat, (*MEANS, *TAILS), strict=False):
        _draw_ratios(panel, pairs(rows), places, column, label)
    panels[0][0].legend(fontsize=7)
    _draw_causes(panels[1][2], select(rows, load=LOADS[-1]))
    for panel, (depth,) in zip(panels[2], distinct(rows, "depth"), strict=False):
        _draw_bubbles(panel, pairs(select(rows, load=LOADS[-1], depth=depth)), depth)
    panels[2][0].legend(fontsize=7)


def _draw_ratios(
    panel: Any,
    cells: Sequence[tuple[Row, Row]],
    places: dict[tuple[Any, ...], int],
    column: str,
    label: str,
) -> None:
    """A dot for each machine, filled at the highest load."""
    machines = distinct([old for old, _ in cells], "model", "device")
    for number, (model, device) in enumerate(machines):
        for load in LOADS:
            points = [
                (
                    places[old["depth"], old["trace"]] + 0.15 * (number - 1.5),
                    new[column] / old[column],
                )
                for old, new in cells
                if (old["model"], old["device"], old["load"]) == (model, device, load)
            ]
            panel.plot(
                *zip(*points, strict=True),
                linestyle="none",
                marker="o",
                markersize=4,
                color=f"C{number}",
                markerfacecolor=f"C{number}" if load == LOADS[-1] else "none",
                label=f"{model}, {device}, load {load:g}",
            )
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xticks(
        list(places.values()),
        [
            f"PP {depth} {trace.split('_su')[0].split('_conversation')[0]}"
            for depth, trace in places
        ],
        rotation=60,
        ha="right",
        fontsize=7,
    )
    panel.set_ylabel(f"{label}, time / tokens")
    panel.grid(alpha=0.3)


def _draw_bubbles(panel: Any, cells: Sequence[tuple[Row, Row]], depth: int) -> None:
    places = range(len(cells))
    for color, label, values in (
        ("#0072B2", "tokens", [old["bubbles"] for old, _ in cells]),
        ("#D55E00", "time", [new["bubbles"] for _, new in cells]),
    ):
        panel.plot(places, [100 * one for one in values], "o", color=color, label=label)
    floors = [100 * new["floor"] for _, new in cells]
    panel.plot(places, floors, "_", color="black", markersize=9, label="floor (whole layers)")
    if depth in AIMS:
        panel.axhline(100 * AIMS[depth], color="#999999", linewidth=0.8, linestyle=":", label="aim")
    names = [f"{old['model'].split('-', 1)[1]} {old['trace'][:10]}" for old, _ in cells]
    panel.set_xticks(places, names, rotation=75, ha="right", fontsize=6)
    panel.set_title(f"PP {depth}, load {LOADS[-1]:g}", fontsize=9)
    panel.set_ylabel("idle share of the stages (%)")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)


def _draw_causes(panel: Any, rows: Sequence[Row]) -> None:
    """The mean over all cells of a depth."""
    bars = distinct(rows, "depth", "policy")
    # A part may be negative: those are stacked downwards.
    tops, bottoms = [0.0] * len(bars), [0.0] * len(bars)
    for number, cause in enumerate(CAUSES):
        for at, (depth, policy) in enumerate(bars):
            height = 100 * _mean(rows, cause, depth, policy)
            ends = tops if height >= 0.0 else bottoms
            label = cause if at == 0 else None
            panel.bar(at, height, bottom=ends[at], color=f"C{number}", label=label, width=0.7)
            ends[at] += height
    panel.set_xticks(range(len(bars)), [f"PP {d}\n{p}" for d, p in bars], fontsize=6)
    panel.set_ylabel(f"idle share by cause (%), load {LOADS[-1]:g}")
    panel.legend(fontsize=6)


def _mean(rows: Sequence[Row], column: str, depth: int, policy: str) -> float:
    values = [row[column] for row in select(rows, depth=depth, policy=policy) if column in row]
    return sum(values) / len(values)


def conclude(rows: Sequence[Row]) -> list[str]:
    cells = pairs(rows)
    lines = [_summary(cells, load) for load in LOADS]
    lines += [_worse(cells, column, label) for column, label in (*MEANS, *TAILS)]
    for depth, load in distinct(rows, "depth", "load"):
        lines.append(_bubble_line(select(rows, depth=depth, load=load), depth, load))
    return lines


def _summary(cells: Sequence[tuple[Row, Row]], load: float) -> str:
    """The least, the middle and the largest ratio of each number."""
    parts = []
    for column, label in (*MEANS, *TAILS):
        ratios = sorted(new[column] / old[column] for old, new in cells if old["load"] == load)
        low, middle, high = ratios[0], ratios[len(ratios) // 2], ratios[-1]
        parts.append(f"{label} {middle:.3f} ({low:.3f} to {high:.3f})")
    return f"load {load:g}, time throttle / token throttle, median (range): {', '.join(parts)}"


def _worse(cells: Sequence[tuple[Row, Row]], column: str, label: str) -> str:
    """Names every cell in which the time throttle is worse by more than `TOLERANCE`."""
    sign = 1.0 if column.endswith("_per_s") else -1.0
    named = [
        f"{old['model']} {old['device']} PP {old['depth']} {old['trace']} load {old['load']:g} "
        f"{new[column] / old[column] - 1:+.1%}"
        for old, new in cells
        if sign * (new[column] / old[column] - 1.0) < -TOLERANCE
    ]
    return f"{label} worse by more than {TOLERANCE:.0%} in {len(named)} of {len(cells)} cells" + (
        f": {'; '.join(named)}" if named else ""
    )


def _bubble_line(rows: Sequence[Row], depth: int, load: float) -> str:
    before, after = (select(rows, policy=policy) for policy in POLICIES)
    text = f"PP {depth}, load {load:g}: bubbles by tokens {_spread(before, 'bubbles')}, by time "
    text += f"{_spread(after, 'bubbles')}, floor {_spread(after, 'floor')}"
    if depth in AIMS:
        aim = AIMS[depth]
        old, new, floor = (
            sum(row[column] < aim for row in chosen)
            for chosen, column in ((before, "bubbles"), (after, "bubbles"), (after, "floor"))
        )
        text += (
            f"; under {aim:.0%} in {new} of {len(after)} cells, by tokens in {old} "
            f"(the floor is in {floor})"
        )
    causes = ", ".join(
        f"{cause} {_mean(rows, cause, depth, POLICIES[0]):.1%} to "
        f"{_mean(rows, cause, depth, POLICIES[1]):.1%}"
        for cause in CAUSES
    )
    return f"{text}; by cause, means: {causes}"


def _spread(rows: Sequence[Row], column: str) -> str:
    values = [row[column] for row in rows]
    return f"{sum(values) / len(values):.1%} ({min(values):.1%} to {max(values):.1%})"


FIGURE = Figure(
    name="time_throttle",
    title="Throttle by time against throttle by tokens, split by time",
    claim="None: gLLM throttles tokens. Ours to show: bubbles under 5 % at PP 4 and 8 % at PP 8 at "
    "saturation, and no cell worse by more than 1 % without being named.",
    assumptions=f"{MOST_REQUESTS} requests (of Mooncake 100, of arXiv 200), Poisson arrivals over "
    "PCIe, at shares (load) of the requests a second that the token throttle carries when all come "
    f"at once. Bubbles are of {WINDOW[0]:.0%} to {WINDOW[1]:.0%} of the time to the last arrival; "
    "their floor comes from whole layers and the ends, 1 - mean stage / slowest stage, which no "
    "order of work removes. By cause they are of the same steps back to back, without links, host "
    "and missing work; the split weighs the head, so that taking it out first makes the stages "
    "less equal, not more. Steps are predicted by costs fitted to the tables beforehand.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
