"""Measures the cost of recording steps: processor time for each step, beside the steps' own.

    python -m benchmark.overheads.tracing_cost

Run by hand, some seconds; no model, no processes. A core's decodes go through a virtual
pipeline of two stages, and each is recorded as the server does it: without a writer, with that of
`--trace-path`, of `--trace-steps`, and with both. They take turns. What a stage adds
is its seven moments of a step, sent along with the report that it sends anyway.
"""

import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from benchmark.support.command import Command, Options, Report, at_least_one
from benchmark.support.dated_result import markdown_table
from benchmark.support.serving_report import spread
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.managers.reports.trace_files import TraceFiles
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.step_history import StepHistory
from sgl_pipeline.records.chrome_trace import ChromeTraceWriter
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.records.trace import EventWriter, TraceWriter
from sgl_pipeline.requests import GREEDY, Request, StopRules
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import make_policy
from sgl_pipeline.wire.stage_messages import StageReport

STAGES = 2
REQUESTS = 64
PROMPT_TOKENS = 200
WRITERS: dict[str, tuple[Callable[[Path], EventWriter], ...]] = {
    "the records alone": (),
    "with --trace-path": (TraceWriter,),
    "with --trace-steps": (ChromeTraceWriter,),
    "with both": (TraceWriter, ChromeTraceWriter),
}
MOMENTS = "seven moments on a stage"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=9)
    command.add("--steps", type=at_least_one, default=2000, help="timed steps of each kind a round")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    costs_us = measure(options.rounds, options.steps)
    facts = {
        "steps": f"{REQUESTS // STAGES} decodes each, {STAGES} stages",
        "figures": f"medians (smallest to largest) of {options.rounds} rounds of "
        f"{options.steps} steps, processor time",
    }
    return Report(
        name="tracing_cost",
        texts=[cost_table(costs_us)],
        facts={"load": facts},
        record={"us_a_step": costs_us},
    )


def measure(num_rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Microseconds a step, a value for each round."""
    costs_us: dict[str, list[float]] = {name: [] for name in (*WRITERS, MOMENTS)}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(num_rounds):
            for name, kinds in WRITERS.items():
                paths = (Path(directory) / f"{place}.json" for place in range(len(kinds)))
                writers = [kind(path) for kind, path in zip(kinds, paths, strict=True)]
                costs_us[name].append(_recording_us(writers, num_steps))
            costs_us[MOMENTS].append(_moments_us(num_steps))
    return costs_us


def cost_table(costs_us: dict[str, list[float]]) -> str:
    """Markdown, with the length of a step of which that is one percent."""
    rows = [
        [name, str(spread(values)), f"{statistics.median(values) / 10:.1f}"]
        for name, values in costs_us.items()
    ]
    return markdown_table(["what", "us a step", "1 % of a step of ms"], rows)


def _recording_us(writers: list[EventWriter], num_steps: int) -> float:
    """The time that the scheduler process spends on its records."""
    traces, history, spent_s = TraceFiles(writers), StepHistory(STAGES), 0.0
    for step in _steps(num_steps):
        started = time.thread_time()
        record = step.record()
        history.add(record)
        traces.on(record)
        spent_s += time.thread_time() - started
    traces.close()
    return spent_s / num_steps * 1e6


def _moments_us(num_steps: int) -> float:
    """The time that a stage spends on looking at the clock and keeping what it saw."""
    started = time.thread_time()
    for step_id in range(num_steps):
        _report(0, step_id)
    with_moments_s = time.thread_time() - started
    timing = StageTiming(*[0.0] * 7)
    started = time.thread_time()
    for step_id in range(num_steps):
        StageReport(stage=0, step_id=step_id, epoch=0, timing=timing)
    return (with_moments_s - (time.thread_time() - started)) / num_steps * 1e6


def _report(stage: int, step_id: int) -> StageReport:
    clock = time.monotonic
    timing = StageTiming(clock(), clock(), clock(), clock(), clock(), clock(), clock())
    return StageReport(stage=stage, step_id=step_id, epoch=0, timing=timing)


def _steps(num_steps: int) -> Iterator[OpenStep]:
    """Steps of decodes that have come back."""
    most_tokens = PROMPT_TOKENS + REQUESTS + num_steps  # of a request that has not ended
    scheduler = StepScheduler(
        SchedulingArgs(),
        make_policy(ThrottleArgs(policy="throttle")),
        num_pages=REQUESTS * most_tokens,
        num_stages=STAGES,
        context_length=most_tokens,
    )
    core = PipelineCore(scheduler, StagePlan(0, (1,) * STAGES))
    for number in range(REQUESTS):
        prompt = list(range(number, number + PROMPT_TOKENS))
        stops = StopRules(max_new_tokens=REQUESTS + num_steps)
        scheduler.add(Request(str(number), prompt, GREEDY, stops))
    in_flight: deque[OpenStep] = deque()
    while num_steps > 0:
        while (step := core.next_step(time.monotonic())) is not None:
            in_flight.append(step)
        oldest = in_flight.popleft()
        tokens = (7,) * oldest.microbatch.num_samples
        for stage in range(STAGES):
            report = _report(stage, oldest.microbatch.step_id)
            if stage == STAGES - 1:
                report = msgspec.structs.replace(report, token_ids=tokens)
            core.take_report(report, time.monotonic())
        if oldest.microbatch.num_prefill_tokens == 0:
            num_steps -= 1
            yield oldest


if __name__ == "__main__":
    sys.exit(main())
