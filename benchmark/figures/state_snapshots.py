"""The radix cache of a model with states, by its snapshots and slots, and of one without:
conversations of several turns."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure as Canvas

from benchmark.figures.figure import Figure, Options, Row, change, numbers, run, select
from benchmark.figures.stores import Load
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.simulator.experiment import Cluster

CLUSTER = Cluster(model="Qwen2.5-32B", device="a100-80g", num_stages=4)
LOAD = Load(name="ShareGPT", trace="sharegpt_multiturn", rate_per_s=2.0, mean_think_s=10.0)
MOST_RUNNING = 64
# Slots for each request that may run; the server has 3.
SLOTS_EACH = (1.5, 3.0, 6.0)
DEFAULT_SLOTS_EACH = 3.0
STATELESS, OFF, PROMPTS = "without states", "cache off", "prompts alone"
# What is compared on a model with states, and the tokens between a decode's snapshots.
INTERVALS: dict[str, int | None] = {
    PROMPTS: 0,
    "answers too, every 256 tokens": None,
    "answers too, every 64": 64,
}
BOUNDS = (STATELESS, OFF)
STYLE: dict[str, dict[str, Any]] = {
    STATELESS: {"color": "#009E73", "linestyle": "--"},
    OFF: {"color": "#999999", "linestyle": ":"},
    PROMPTS: {"color": "#D55E00", "marker": "s"},
    "answers too, every 256 tokens": {"color": "#0072B2", "marker": "o"},
    "answers too, every 64": {"color": "#56B4E9", "marker": "v"},
}
COLUMNS = (
    ("cache_hit_share", 100.0, "prompt tokens not computed (%)"),
    ("ttft_ms", 1e-3, "mean TTFT (s)"),
    ("output_tokens_per_s", 1.0, "output tokens/s"),
)


def compute(options: Options) -> list[Row]:
    load = LOAD if options.trace is None else replace(LOAD, trace=options.trace)
    workload = load.requests(options)
    base = SchedulingArgs(max_running_requests=MOST_RUNNING)
    with_slots = [
        (each, replace(base, num_state_slots=round(each * MOST_RUNNING))) for each in SLOTS_EACH
    ]
    cases = [(STATELESS, 0.0, base)]
    cases += [(OFF, each, replace(one, radix_cache=False)) for each, one in with_slots[:1]]
    cases += [
        (system, each, replace(one, track_interval=interval))
        for system, interval in INTERVALS.items()
        for each, one in with_slots
    ]
    rows = []
    for system, slots_each, scheduling in cases:
        simulation = run(CLUSTER, ThrottleArgs(policy="throttle"), workload, scheduling)
        setting = {
            "system": system,
            "slots_each": slots_each,
            "num_state_slots": scheduling.num_state_slots,
            "num_turns": len(simulation.requests),
        }
        rows.append(setting | numbers(simulation))
    return rows


def draw(rows: Sequence[Row], canvas: Canvas) -> None:
    canvas.set_size_inches(13, 4)
    for panel, (column, factor, label) in zip(canvas.subplots(1, 3), COLUMNS, strict=True):
        for system in INTERVALS:
            points = select(rows, system=system)
            places = [row["num_state_slots"] for row in points]
            panel.plot(
                places, [factor * row[column] for row in points], label=system, **STYLE[system]
            )
        for system in BOUNDS:
            (row,) = select(rows, system=system)
            panel.axhline(factor * row[column], label=system, **STYLE[system])
        panel.set_xlabel(f"state slots, with {MOST_RUNNING} requests at most")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    canvas.axes[0].legend(fontsize=8)


def conclude(rows: Sequence[Row]) -> list[str]:
    (stateless,), (off,) = (select(rows, system=system) for system in BOUNDS)
    lines = [f"{stateless['num_turns']} turns were served"]
    lines += [_line(row, off) for row in (off, stateless)]
    for each in SLOTS_EACH:
        lines += [_line(row, off) for row in select(rows, slots_each=each) if row is not off]
    (prompts,) = select(rows, system=PROMPTS, slots_each=DEFAULT_SLOTS_EACH)
    for system in INTERVALS:
        (row,) = select(rows, system=system, slots_each=DEFAULT_SLOTS_EACH)
        if system != PROMPTS:
            lines.append(
                f"with {row['num_state_slots']} slots, the default, {system} against {PROMPTS}: "
                f"mean TTFT {change(row, prompts, 'ttft_ms')}, p99 "
                f"{change(row, prompts, 'ttft_p99_ms')}, output tokens/s "
                f"{change(row, prompts, 'output_tokens_per_s')}"
            )
    return lines


def _line(row: Row, off: Row) -> str:
    slots = f", {row['num_state_slots']} slots" if row["num_state_slots"] else ""
    return (
        f"{row['system']}{slots}: {row['cache_hit_share']:.1%} of prompt tokens found, "
        f"{row['output_tokens_per_s']:.0f} output tokens/s "
        f"({change(row, off, 'output_tokens_per_s')} against {OFF}), TTFT mean "
        f"{row['ttft_ms'] / 1e3:.2f} s ({change(row, off, 'ttft_ms')}), p99 "
        f"{row['ttft_p99_ms'] / 1e3:.2f} s"
    )


FIGURE = Figure(
    name="state_snapshots",
    title="The radix cache of a model with states, by what snapshots it takes, PP 4",
    claim="None: SGLang's cache of states, whose decodes leave a snapshot every 256 tokens "
    "(--mamba-track-interval).",
    assumptions=f"Step times of {CLUSTER.model}, which has no states, on four A100; states cost no "
    "time and no memory beside their slots, and a decode that goes on in another slot costs what "
    f"others do. ShareGPT's conversations begin at {LOAD.rate_per_s:g}/s, with pauses of "
    f"{LOAD.mean_think_s:g} s on average between turns; at most {MOST_RUNNING} requests run at "
    "once, and the pool is what the cards hold.",
    compute=compute,
    draw=draw,
    conclude=conclude,
)
