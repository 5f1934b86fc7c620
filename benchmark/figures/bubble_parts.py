"""Every idle second of the stages at PP 4 and 8, by what would take it away and by what the next
step was doing: at the rate that the token throttle carries, and with all requests at once."""

from collections.abc import Sequence
from random import Random

from matplotlib.figure import Figure as Canvas

from benchmark.figures.bubble_rest import DEPTHS, MACHINES, POLICY, TRACES
from benchmark.figures.figure import Figure, Options, Row, distinct, numbers, select
from benchmark.figures.idle_parts import CAUSES, MOMENTS, LeftOver, Run, idle_parts
from benchmark.figures.plans import plan_text
from benchmark.figures.time_throttle import SCHEDULING, WINDOW
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.summary import summarize
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.workload import SimulatedRequest, poisson_arrivals
from sgl_pipeline.throttle import make_policy

LOADS = ("at the rate", "at once")
AT_ONCE = float("inf")


class WatchedScheduler(StepScheduler):
    """Notes what each step leaves over."""

    left_over: list[LeftOver]

    def next_microbatch(self, now_s: float) -> Microbatch | None:
        microbatch = super().next_microbatch(now_s)
        if microbatch is not None:
            chunks, load = microbatch.chunks, microbatch.load
            decodes = sum(chunk.is_decode for chunk in chunks)
            prefill_tokens = sum(chunk.length for chunk in chunks if not chunk.is_decode)
            left = LeftOver(load.ready_decodes - decodes, load.waiting_tokens - prefill_tokens)
            self.left_over.append(left)
        return microbatch


def watched(
    cluster: Cluster,
    throttle: ThrottleArgs,
    workload: Sequence[SimulatedRequest],
    scheduling: SchedulingArgs = SCHEDULING,
) -> tuple[Simulation, Run]:
    """Serves the workload, and keeps what `idle_parts` asks for."""
    pool_tokens = cluster.kv_pool_tokens()
    scheduler = WatchedScheduler(
        scheduling,
        make_policy(throttle),
        num_pages=pool_tokens // scheduling.page_size,
        num_stages=cluster.num_stages,
        context_length=pool_tokens,
    )
    scheduler.left_over = []
    pipeline = cluster.pipeline(scheduler, scheduling.page_size, is_timed=True)
    simulation = pipeline.run(workload)
    run = Run(
        steps=simulation.steps,
        left_over=scheduler.left_over,
        arrivals_s=sorted(served.arrival_s for served in simulation.requests),
        costs=cluster.costs(),
        limit=cluster.num_stages + scheduling.extra_steps_in_flight,
    )
    return simulation, run


def busy_window(run: Run) -> tuple[int, int]:
    """The steps [first, end) within `WINDOW` of the time to the last arrival, or where all come at
    once to the last step that leaves prompts over."""
    last_s = run.arrivals_s[-1]
    if not last_s:
        waiting = [n for n, left in enumerate(run.left_over) if left.waiting_tokens > 0]
        last_s = run.steps[waiting[-1]].ends_s[-1]
    inside = [
        number
        for number, step in enumerate(run.steps)
        if step.starts_s[0] >= WINDOW[0] * last_s and step.ends_s[-1] <= WINDOW[1] * last_s
    ]
    return inside[0], inside[-1] + 1


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


def _cell(cluster: Cluster, trace: str, options: Options) -> list[Row]:
    requests = load_trace(trace, options.num_requests)

    def workload(rate_per_s: float) -> list[SimulatedRequest]:
        return poisson_arrivals(requests, rate_per_s, Random(options.seed))

    carried, _ = watched(cluster, ThrottleArgs(policy="throttle"), workload(AT_ONCE))
    capacity_per_s = summarize(carried).requests_per_s
    rows: list[Row] = []
    for load, rate_per_s in zip(LOADS, (capacity_per_s, AT_ONCE), strict=True):
        simulation, run = watched(cluster, POLICY, workload(rate_per_s))
        first, end = busy_window(run)
        steps = run.steps[first:end]
        decodes = sum(step.shape.num_decodes for step in steps) / len(steps)
        row = {"load": load, "window_steps": len(steps), "decodes_a_step": decodes}
        rows.append(row | numbers(simulation) | idle_parts(run, first, end))
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    """A bar for each depth and load, once by causes and once by moments."""
    canvas.set_size_inches(11, 4.5)
    bars = distinct(rows, "depth", "load")
    for panel, names in zip(canvas.subplots(1, 2), (CAUSES, MOMENTS), strict=True):
        tops, bottoms = [0.0] * len(bars), [0.0] * len(bars)
        for color, name in enumerate(names):
            for at, (depth, load) in enumerate(bars):
                height = 100 * _mean(select(rows, depth=depth, load=load), name)
                ends = tops if height >= 0.0 else bottoms
                label = name if at == 0 else None
                panel.bar(at, height, bottom=ends[at], color=f"C{color}", label=label, width=0.7)
                ends[at] += height
        panel.set_xticks(range(len(bars)), [f"PP {depth}\n{load}" for depth, load in bars])
        panel.set_ylabel("idle share of the stages (%)")
        panel.legend(fontsize=8)


def _mean(rows: Sequence[Row], column: str) -> float:
    return sum(row[column] for row in rows) / len(rows)


def conclude(rows: Sequence[Row]) -> list[str]:
    lines = []
    for depth, load in distinct(rows, "depth", "load"):
        chosen = select(rows, depth=depth, load=load)
        for title, names in (("causes", CAUSES), ("the next step", MOMENTS)):
            parts = ", ".join(f"{name} {100 * _mean(chosen, name):.1f}" for name in names)
            lines.append(
                f"PP {depth}, {load}: idle {100 * _mean(chosen, 'idle'):.1f} % of the stages' time; "
                f"points by {title}: {parts}"
            )
    return lines


FIGURE = Figure(
    name="bubble_parts",
    title="Idle time of the stages, second by second",
    claim="None.",
    assumptions="Throttled by time, split by time; means over machines and traces. "
    f"{WINDOW[0]:.0%} to {WINDOW[1]:.0%} of the time to the last arrival (at once: until no prompt "
    "is left over). Causes add up to the whole, and each is what it adds to those before it when "
    "the same steps run back to back; lack of work is what the run itself adds. Moments add up to "
    "what is idle beyond whole layers and the ends of the window: the pipeline was full or had "
    "room, and work waited or did not, or the next step was on its way.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
