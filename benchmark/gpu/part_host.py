"""Part `host`: what the host does in a decode of a whole model, whose next step needs its tokens.

`prepare` is all that a step needs before its activations, `launch` the launching of its kernels,
`wait` the rest until its tokens are on the host; kernels run from the launching on. Below are the
functions that take longest by themselves, as Python's profiler sees them, which makes calls slower.
"""

import cProfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmark.gpu.device_times import synchronize
from benchmark.gpu.lone_stage import LoneStage, StagePlace
from benchmark.gpu.session import Session
from benchmark.gpu.shapes import PAGE_SIZE, SMALL_STEPS, Step, decode_step, spec_of
from benchmark.support.dated_result import markdown_table
from sgl_pipeline.stage_plan import StagePlan

_STEPS = tuple(decode_step(count, 1024) for count in (1, 64, 256))
_WARMUPS, _REPEATS, _PROFILED = 5, 100, 50
_TOP_FUNCTIONS = 25
_COLUMNS = ("prepare_us", "launch_us", "wait_us")


@dataclass(frozen=True, slots=True)
class HostFunction:
    """A function by file and name: calls of a step, and microseconds in it and not below it."""

    name: str
    calls: float
    own_us: float


def run(session: Session) -> None:
    """Each model in one stage."""
    steps = SMALL_STEPS[:1] if session.is_rehearsal else _STEPS
    for model in session.models:
        work = partial(_time_model, session, model, steps)
        session.attempt(f"timing the host of {model}", work, kind="host", guess_s=15.0)


def _time_model(session: Session, model: str, steps: tuple[Step, ...]) -> None:
    spec = spec_of(model)
    stage = LoneStage(
        StagePlace(spec, StagePlan(0, (spec.num_layers,)), 0),
        session.device,
        num_pages=max(step.num_pages(PAGE_SIZE) for step in steps),
        max_rows=max(step.num_rows for step in steps),
    )
    for step in steps:
        times = dict(zip(_COLUMNS, _times_us(stage, step), strict=True))
        functions = [asdict(each) for each in _functions(stage, step)]
        row = {"model": model, "step": step.name, **times, "functions": functions}
        session.book_row("host", row)
        session.say(f"{step.name}: {sum(times.values()):.0f} us")


def _times_us(stage: LoneStage, step: Step) -> tuple[float, float, float]:
    """Mean microseconds of a step's preparation, launching and waiting."""
    stage.prepare(step, _WARMUPS + _REPEATS)
    for _ in range(_WARMUPS):
        stage.run()
    synchronize(stage.device)
    sums_s = [0.0, 0.0, 0.0]
    for _ in range(_REPEATS):
        moments_s = [time.perf_counter()]
        prepared = stage.runner.prepare(stage.next_order())
        moments_s.append(time.perf_counter())
        pending = stage.runner.launch(prepared)
        moments_s.append(time.perf_counter())
        pending.report()
        moments_s.append(time.perf_counter())
        for place in range(3):
            sums_s[place] += moments_s[place + 1] - moments_s[place]
    prepare_us, launch_us, wait_us = (seconds / _REPEATS * 1e6 for seconds in sums_s)
    return prepare_us, launch_us, wait_us


def _functions(stage: LoneStage, step: Step) -> list[HostFunction]:
    """The functions of a step that take longest by themselves, longest first."""
    stage.prepare(step, _PROFILED)
    with cProfile.Profile() as profile:
        for _ in range(_PROFILED):
            stage.run()
    profile.create_stats()
    found = [
        HostFunction(f"{Path(file).name}:{name}", calls / _PROFILED, own_s / _PROFILED * 1e6)
        for (file, _, name), (_, calls, own_s, _, _) in profile.stats.items()
    ]
    return sorted(found, key=lambda each: -each.own_us)[:_TOP_FUNCTIONS]


def text(session: Session) -> str:
    """The times of steps, and the longest functions of the largest one of each model."""
    rows = session.table("host")
    if not rows:
        return ""
    heads = ["model", "step", "prepare us", "launch us", "wait us"]
    times = [
        [row["model"], row["step"], *(f"{row[name]:.0f}" for name in _COLUMNS)] for row in rows
    ]
    texts = ["## The host in a step", markdown_table(heads, times)]
    for row in rows:
        functions = [
            [f"`{each['name']}`", f"{each['calls']:.1f}", f"{each['own_us']:.1f}"]
            for each in row["functions"]
        ]
        table = markdown_table(["function", "calls", "us by itself"], functions)
        texts.append(f"### {row['model']}, {row['step']}, profiled\n\n{table}")
    return "\n\n".join(texts)
