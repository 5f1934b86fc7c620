"""The idle time of the stages at PP 4 and 8 while something is on its way, by what would take it
away and by what the next step was doing: at the rate that the token throttle carries, and where
clients never pause."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import fmean

from matplotlib.figure import Figure as Canvas

from benchmark.figures.bubble_rest import DEPTHS, MACHINES, OUR_HOST, POLICY, TRACES
from benchmark.figures.figure import Figure, Options, Row, closed_loop, distinct, select
from benchmark.figures.idle_parts import CAUSES, MOMENTS, LeftOver, Run, idle_parts
from benchmark.figures.plans import plan_text
from benchmark.figures.time_throttle import SCHEDULING, WINDOW
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.experiment import VIDUR_A100_HOST, Cluster
from sgl_pipeline.simulator.simulation import Simulation
from sgl_pipeline.simulator.summary import summarize
from sgl_pipeline.simulator.traces import load_trace
from sgl_pipeline.simulator.workload import SimulatedRequest, poisson_arrivals
from sgl_pipeline.throttle import make_policy

AT_THE_RATE = "at the rate"
# Loads of a pipeline that is never short of requests: its host, and #T.
SATURATED = {
    "saturated": (OUR_HOST, POLICY.prefill_spread_steps),
    "saturated, #T doubled": (OUR_HOST, 2 * POLICY.prefill_spread_steps),
    "saturated, Vidur's host": (VIDUR_A100_HOST, POLICY.prefill_spread_steps),
}
# Each client has its next request once it has its answer; the steps of a run, and the share of them
# until it runs evenly.
CLIENTS_PER_STAGE = 32
MOST_STEPS = 1600
FIRST_SHARE = 0.3
# More than they can ask for in so many steps.
MANY_REQUESTS = 4000


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
    most_steps: int | None = None,
) -> tuple[Simulation, Run]:
    """Serves the workload, or `most_steps` steps of it, and keeps what `idle_parts` asks for."""
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
    simulation = pipeline.run(workload, most_steps=most_steps)
    run = Run(
        steps=simulation.steps,
        left_over=scheduler.left_over,
        arrivals_s=sorted(served.arrival_s for served in simulation.requests),
        costs=cluster.costs(),
        limit=cluster.num_stages + scheduling.extra_steps_in_flight,
    )
    return simulation, run


def arrival_steps(run: Run) -> tuple[int, int]:
    """The steps [first, end) within `WINDOW` of the time to the last arrival."""
    first_s, end_s = (share * run.arrivals_s[-1] for share in WINDOW)
    inside = [
        number
        for number, step in enumerate(run.steps)
        if step.starts_s[0] >= first_s and step.ends_s[-1] <= end_s
    ]
    return inside[0], inside[-1] + 1


def compute(options: Options) -> list[Row]:
    rows = []
    for model, device in MACHINES:
        for depth in DEPTHS:
            cluster = Cluster(
                model=model, device=device, num_stages=depth, split="auto", host=OUR_HOST
            )
            for trace in (options.trace,) if options.trace is not None else TRACES:
                setting = {"model": model, "depth": depth, "trace": trace}
                setting |= {"plan": plan_text(cluster.layers)}
                row = _at_the_rate(cluster, trace, options)
                rows.append(setting | {"load": AT_THE_RATE} | row)
                for load, (host, spread_steps) in SATURATED.items():
                    throttle = replace(POLICY, prefill_spread_steps=spread_steps)
                    row = _saturated(replace(cluster, host=host), throttle, trace)
                    rows.append(setting | {"load": load} | row)
    return rows


def _at_the_rate(cluster: Cluster, trace: str, options: Options) -> Row:
    """A run at the rate that the token throttle carries when all requests come at once."""
    requests = load_trace(trace, options.num_requests)

    def workload(rate_per_s: float) -> list[SimulatedRequest]:
        return poisson_arrivals(requests, rate_per_s, Random(options.seed))

    carried, _ = watched(cluster, ThrottleArgs(policy="throttle"), workload(float("inf")))
    simulation, run = watched(cluster, POLICY, workload(summarize(carried).requests_per_s))
    return window_row(simulation, run, *arrival_steps(run))


def _saturated(cluster: Cluster, throttle: ThrottleArgs, trace: str) -> Row:
    """The even steps of a run whose clients never pause."""
    requests = poisson_arrivals(load_trace(trace, MANY_REQUESTS), float("inf"), Random(0))
    clients = closed_loop(requests, CLIENTS_PER_STAGE * cluster.num_stages)
    simulation, run = watched(cluster, throttle, clients, most_steps=MOST_STEPS)
    return window_row(simulation, run, int(FIRST_SHARE * len(run.steps)), len(run.steps))


def window_row(simulation: Simulation, run: Run, first: int, end: int) -> Row:
    """Speed and latencies in the time of the steps [first, end), and its idle parts. `tpot_ms` is
    the mean time between two tokens of a request."""
    steps = run.steps[first:end]
    start_s, end_s = steps[0].starts_s[0], steps[-1].ends_s[-1]
    served = [one for one in simulation.requests if one.token_times_s]
    firsts_s = [
        one.token_times_s[0] - one.arrival_s
        for one in served
        if start_s <= one.token_times_s[0] <= end_s
    ]
    gaps_s = [
        after_s - before_s
        for one in served
        for before_s, after_s in pairwise(one.token_times_s)
        if start_s <= before_s and after_s <= end_s
    ]
    return {
        "window_steps": len(steps),
        "decodes_a_step": sum(step.shape.num_decodes for step in steps) / len(steps),
        "tokens_per_s": sum(step.shape.num_tokens for step in steps) / (end_s - start_s),
        "ttft_ms": 1e3 * fmean(firsts_s),
        "tpot_ms": 1e3 * fmean(gaps_s),
        **idle_parts(run, first, end),
    }


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
        beside = select(rows, depth=depth, load="saturated")
        ratios = "" if load in (AT_THE_RATE, "saturated") else f" ({_ratios(chosen, beside)})"
        idle = f"idle {100 * _mean(chosen, 'idle'):.1f} % of the stages' time"
        for title, names in (("cause", CAUSES), ("what was waited for", MOMENTS)):
            parts = ", ".join(f"{name} {100 * _mean(chosen, name):.1f}" for name in names)
            lines.append(f"PP {depth}, {load}{ratios}: {idle}; points by {title}: {parts}")
        if load == AT_THE_RATE:
            by_trace = ", ".join(
                f"{trace} {_points(select(chosen, trace=trace))}"
                for (trace,) in distinct(chosen, "trace")
            )
            lines.append(f"PP {depth}, {load}: points of lack of work by trace: {by_trace}")
    return lines


def _points(rows: Sequence[Row]) -> str:
    """Lack of work in each of the rows."""
    return " and ".join(f"{100 * row['lack of work']:z.1f}" for row in rows)


def _ratios(rows: Sequence[Row], beside: Sequence[Row]) -> str:
    """Speed and latencies over those of other rows of the same cells, means of the cells."""
    texts = []
    for column, label in (("tokens_per_s", "throughput"), ("ttft_ms", "TTFT"), ("tpot_ms", "TPOT")):
        ratio = fmean(own[column] / other[column] for own, other in zip(rows, beside, strict=True))
        texts.append(f"{label} x {ratio:.3f}")
    return ", ".join(texts)


FIGURE = Figure(
    name="bubble_parts",
    title="Idle time of the stages, second by second",
    claim="None.",
    assumptions="Throttled by time, split by time; means over machines and traces; host times as "
    "bench_decisions measured ours, or Vidur's. "
    f"At the rate that the token throttle carries: {WINDOW[0]:.0%} to {WINDOW[1]:.0%} of the time "
    f"to the last arrival. Saturated: {CLIENTS_PER_STAGE} clients a stage that never pause, steps "
    f"{FIRST_SHARE * MOST_STEPS:.0f} to {MOST_STEPS}. Left out is the time when nothing is on its "
    "way. Causes add up to the whole, each by what it adds to those before it when the same steps "
    "run back to back; lack of work is what the run itself adds. Moments add up to what is idle "
    "beyond the first two causes, by what the slowest stage waited for: the pipeline was full or "
    "had room, and work waited or did not, or its next step was on the way.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
