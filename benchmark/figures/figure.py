"""The parts of a figure, and the computation of its numbers: sweeps of simulated runs.

Shared by the files of this folder. Every number that a figure shows is in its rows, so that the
picture can be drawn again from the JSON alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from matplotlib.figure import Figure as Canvas

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.simulator.experiment import Cluster, simulate
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.summary import summarize
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.workload import SimulatedRequest, poisson_arrivals
from sgl_pipeline.status_line import StatusLine, bar

Row = dict[str, Any]

# As many requests as KV holds: the papers give memory "the largest value without running out".
UNBOUNDED = SchedulingArgs(max_running_requests=16384, radix_cache=False)

# What figures compare run by run, and how they call it.
COLUMNS = (
    ("ttft_ms", "TTFT"),
    ("tpot_ms", "TPOT"),
    ("e2e_ms", "E2E"),
    ("output_tokens_per_s", "throughput"),
)

POLICY_STYLE = {
    "throttle": {"color": "#0072B2", "marker": "o"},
    "sarathi": {"color": "#D55E00", "marker": "s"},
    "greedy-queue": {"color": "#999999", "marker": "^"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`trace` replaces the figure's own workloads by a user's file; `num_requests` is how many of
    each workload are served."""

    trace: str | None = None
    num_requests: int = 1000
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`claim` is what the paper says, `assumptions` what is not measured; both are printed under
    the numbers. `conclude` puts the rows into words, computed from them."""

    name: str
    title: str
    claim: str
    compute: Callable[[Options], list[Row]]
    draw: Callable[[Sequence[Row], Canvas], None]
    conclude: Callable[[Sequence[Row]], list[str]]
    assumptions: str = ""


def poisson(name: str, rate_per_s: float, options: Options) -> list[SimulatedRequest]:
    """The first requests of a trace as a Poisson process; the same for every policy."""
    requests = load_trace(name, options.num_requests)
    return poisson_arrivals(requests, rate_per_s, Random(options.seed))


def closed_loop(requests: Iterable[SimulatedRequest], num_clients: int) -> list[SimulatedRequest]:
    """Clients that take turns at the requests; each sends its next one when it has its answer."""
    clients: list[list[SimulatedRequest]] = [[] for _ in range(num_clients)]
    for number, request in enumerate(requests):
        clients[number % num_clients].append(request)
    return [SimulatedRequest.chain(client) for client in clients if client]


def run(
    cluster: Cluster,
    throttle: ThrottleArgs,
    workload: Sequence[SimulatedRequest],
    scheduling: SchedulingArgs = UNBOUNDED,
    most_steps: int | None = None,
) -> Simulation:
    """A simulation that shows how far it is; `most_steps` as in `VirtualPipeline.run`."""
    line = StatusLine(interval_s=0.5)

    def progress(num_finished: int, now_s: float) -> None:
        whole = bar(num_finished, len(workload))
        line.show(f"{throttle.policy}: {whole} requests, {now_s:.0f} s simulated")

    simulation = simulate(cluster, throttle, scheduling, workload, progress, most_steps)
    line.clear()
    return simulation


def numbers(simulation: Simulation, target: LatencyTarget | None = None) -> Row:
    """The columns that figures share, in the units of their names."""
    summary = summarize(simulation, target)
    row = {
        "output_tokens_per_s": summary.output_tokens_per_s,
        "total_tokens_per_s": summary.total_tokens_per_s,
        "ttft_ms": summary.ttft_ms.mean,
        "ttft_p99_ms": summary.ttft_ms.p99,
        "tpot_ms": summary.tpot_ms.mean,
        "tpot_p99_ms": summary.tpot_ms.p99,
        "e2e_ms": summary.e2e_ms.mean,
        "bubble_share": summary.bubble_share,
        "cache_hit_share": summary.cache_hit_share,
        "num_retractions": summary.num_retractions,
        "num_failed": summary.num_failed,
    }
    return row if target is None else row | {"target_share": summary.target_share}


def load_panels(
    rows: Iterable[Row],
    canvas: Canvas,
    columns: Sequence[tuple[str, str]],
    *,
    x_label: str,
    inches: tuple[float, float],
) -> Iterator[tuple[str, str, Any]]:
    """The Axes of `canvas` for each load (down) and column (across), to draw into before the next
    are asked for.

    Args:
        columns: names in `rows`, each with its label.
        inches: width of the canvas, and height of a line of panels.
    """
    loads = [load for (load,) in distinct(rows, "load")]
    canvas.set_size_inches(inches[0], inches[1] * len(loads))
    panels = canvas.subplots(len(loads), len(columns), squeeze=False)
    for load, line in zip(loads, panels, strict=True):
        for panel, (column, label) in zip(line, columns, strict=True):
            yield load, column, panel
            panel.set_xlabel(x_label)
            panel.set_ylabel(label)
            panel.set_ylim(bottom=0)
            panel.set_title(load, fontsize=10)
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def distinct(rows: Iterable[Row], *names: str) -> list[tuple[Any, ...]]:
    """The combinations of these columns, in order of appearance."""
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


def change(new: Mapping[str, Any], old: Mapping[str, Any], name: str) -> str:
    """`name` of `new` against that of `old`, as +12 %."""
    return f"{new[name] / old[name] - 1:+.0%}"
