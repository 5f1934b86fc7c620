"""The bubbles beyond whole layers at PP 4 and 8, by host, links, window and step sizes; and the
effect of two ranges of layers a worker."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import Figure, Options, Row, distinct, numbers, run, select
from benchmark.figures.plans import plan_text
from benchmark.figures.replayed_steps import best_split, floor, idle_share, parts_of, two_ranges
from benchmark.figures.time_throttle import SCHEDULING, arrival_window, bubbles
from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.pipeline_costs import HostCosts
from sgl_pipeline.simulator.simulation import SimulatedStep
from sgl_pipeline.simulator.summary import summarize
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.workload import poisson_arrivals

MACHINES = (("Qwen2.5-14B", "a100-80g"), ("Llama-3.1-70B", "h200"))
TRACES = ("sharegpt", "azure_conv", "azure_code")
DEPTHS = (4, 8)
POLICY = ThrottleArgs(policy="throttle-time")
# 0.19 ms for a step of 127 decodes and as much for its results, as measured by `bench_decisions`
# (benchmark/results/2026-11-21_2015_decisions.md); preparation is Vidur's.
OUR_HOST = HostCosts(
    schedule_step_s=0.05e-3,
    schedule_chunk_s=0.0011e-3,
    prepare_step_s=0.15e-3,
    prepare_chunk_s=0.001e-3,
    result_step_s=0.05e-3,
    result_token_s=0.0011e-3,
)
# What is changed: the host, the link, steps in flight beyond one for each stage.
CHANGES = {
    "as it is": (None, None, 0),
    "our host": (OUR_HOST, None, 0),
    "no host": (HostCosts(), None, 0),
    "no host, no links": (HostCosts(), "ideal", 0),
    "our host, 1 more step": (OUR_HOST, None, 1),
    "our host, 2 more steps": (OUR_HOST, None, 2),
}
LINKS = ("ideal", "pcie", "net10")


def compute(options: Options) -> list[Row]:
    rows = []
    for model, device in MACHINES:
        for depth in DEPTHS:
            cluster = Cluster(model=model, device=device, num_stages=depth, split="auto")
            for trace in (options.trace,) if options.trace is not None else TRACES:
                setting = {"model": model, "depth": depth, "trace": trace}
                setting |= {"plan": plan_text(cluster.layers)}
                rows += [setting | row for row in _cell(cluster, trace, options)]
    return rows


def _cell(cluster: Cluster, trace: str, options: Options) -> Iterator[Row]:
    """Runs with each change at the load that the token throttle carries, then replays."""
    requests = load_trace(trace, min(300, options.num_requests))
    at_once = poisson_arrivals(requests, float("inf"), Random(options.seed))
    capacity = summarize(
        run(cluster, ThrottleArgs(policy="throttle"), at_once, SCHEDULING)
    ).requests_per_s
    workload = poisson_arrivals(requests, capacity, Random(options.seed))
    window: list[SimulatedStep] = []
    for change, (host, link, more_steps) in CHANGES.items():
        changed = replace(cluster, host=host or cluster.host, link=link or cluster.link)
        scheduling = replace(SCHEDULING, extra_steps_in_flight=more_steps)
        simulation = run(changed, POLICY, workload, scheduling)
        steps = arrival_window(simulation)
        window = window or steps
        yield {"change": change, **numbers(simulation), **bubbles(steps, changed)}
    yield from _replays(cluster, window)


def _replays(cluster: Cluster, window: Sequence[SimulatedStep]) -> Iterator[Row]:
    """The steps of the first run back to back, by link, steps in flight and ranges a worker."""
    depth, shapes = cluster.num_stages, [step.shape for step in window]
    for link in LINKS:
        costs = replace(cluster, link=link).costs()
        steps = parts_of(shapes, costs)
        whole, halves = (best_split(steps, sum(cluster.layers), depth, cuts) for cuts in (1, 2))
        for in_flight in (depth, depth + 2, 2 * depth):
            yield {
                "change": "replay",
                "link": link,
                "in_flight": in_flight - depth,
                "one_range": idle_share(steps, cluster.layers, depth, in_flight),
                "two_ranges": idle_share(steps, two_ranges(cluster.layers), depth, in_flight),
                "half_layers": idle_share(steps, halves, depth, in_flight),
                "floor_of_layers": floor(steps, whole),
                "floor_of_halves": floor(steps, halves),
            }


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(12, 4.5)
    depths = distinct(rows, "depth")
    panels = canvas.subplots(1, len(depths), squeeze=False)[0]
    for panel, (depth,) in zip(panels, depths, strict=True):
        chosen = select(rows, depth=depth)
        names = list(CHANGES)
        heights = [_mean(select(chosen, change=name), "bubbles") for name in names]
        for ranges in ("one_range", "two_ranges", "half_layers"):
            for link in LINKS:
                names.append(f"replay, {ranges.replace('_', ' ')}, {link}")
                replays = select(chosen, change="replay", link=link, in_flight=0)
                heights.append(_mean(replays, ranges))
        panel.bar(range(len(names)), [100 * height for height in heights], color="#0072B2")
        for column, style in (("floor_of_layers", "-"), ("floor_of_halves", ":")):
            level = 100 * _mean(select(chosen, change="replay"), column)
            panel.axhline(level, color="black", linestyle=style, label=column.replace("_", " "))
        panel.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        panel.set_title(f"PP {depth}", fontsize=10)
        panel.set_ylabel("idle share of the stages (%)")
        panel.legend(fontsize=8)


def _mean(rows: Sequence[Row], column: str) -> float:
    values = [row[column] for row in rows]
    return sum(values) / len(values)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for (depth,) in distinct(rows, "depth"):
        chosen = select(rows, depth=depth)
        base = select(chosen, change="as it is")
        for change in CHANGES:
            runs = select(chosen, change=change)
            ratios = {
                name: _mean(runs, column) / _mean(base, column)
                for name, column in (("throughput", "total_tokens_per_s"), ("TPOT", "tpot_ms"))
            }
            lines.append(
                f"PP {depth}, {change}: bubbles {_mean(runs, 'bubbles'):.1%}, floor "
                f"{_mean(runs, 'floor'):.1%}, "
                + ", ".join(f"{name} x {ratio:.3f}" for name, ratio in ratios.items())
            )
        lines += _replay_lines(select(chosen, change="replay"), depth)
    return lines


def _replay_lines(rows: Sequence[Row], depth: int) -> list[str]:
    lines = [
        f"PP {depth}, best split: floor {_mean(rows, 'floor_of_layers'):.1%} by whole layers, with "
        f"one range a worker or two; {_mean(rows, 'floor_of_halves'):.1%} by half layers"
    ]
    for link, in_flight in distinct(rows, "link", "in_flight"):
        at = select(rows, link=link, in_flight=in_flight)
        one = _mean(at, "one_range")
        others = []
        for name, column in (("two", "two_ranges"), ("half layers", "half_layers")):
            idle = _mean(at, column)
            # The same work: what the workers idle less they do sooner.
            others.append(f"{name} {idle:.1%} (throughput x {(1.0 - idle) / (1.0 - one):.3f})")
        lines.append(
            f"PP {depth}, back to back, {link}, {in_flight} more in flight: one range a worker "
            f"{one:.1%}, {', '.join(others)}"
        )
    return lines


FIGURE = Figure(
    name="bubble_rest",
    title="Bubbles beyond whole layers, and two ranges of layers a worker",
    claim="None; Megatron-LM interleaves ranges of layers to shorten the filling of a pipeline, "
    "which serving does not empty.",
    assumptions="Requests arrive at the rate that the token throttle carries; throttled by time, "
    "split by time; means over machines and traces. Host times are Vidur's, of another "
    "engine, or those that bench_decisions measured of ours. Replays send the same steps back to "
    "back: the halves of a layer take equal times, and a worker runs the oldest step that it can.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
