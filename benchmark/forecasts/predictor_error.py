"""Measures the predictor's error on steps that it was not fitted to, and its cost.

    python -m benchmark.forecasts.predictor_error /some/model --pp 2 --trace FILE --layer-counts 8,8

Sources: this machine's own kernels, timed by a stage worker as `sgl-pipeline fit` does;
and the published kernel tables of `sgl_pipeline/simulator/data`, for DynaPipe's models. Each is
fitted twice: with our curves, and with the straight lines of DynaPipe's formulas. A fifth of the
steps is held out. With the trace of a server that ran this model on this machine: whole stages, by
the costs from the kernels and by those that the planner fits while it runs. Besides, the time of a
prediction and of a step's planning.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from benchmark.support.command import Command, Options, Report
from benchmark.support.dated_result import markdown_table
from sgl_pipeline.args import StageArgs, require
from sgl_pipeline.costs.stage_costs import MadeUpStep, PartSample
from sgl_pipeline.costs.step_costs import StepCosts
from sgl_pipeline.managers.command_line.model_files import find_model, resolve_dtype
from sgl_pipeline.managers.planning.fit_command import fit_costs, random_steps
from sgl_pipeline.migration.planner import LayerPlanner
from sgl_pipeline.migration.planner_args import PlannerArgs
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_fit import CURVE_ROWS, fit_parts
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pp_runner.model.model_spec import read_model_spec
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.records.trace import StepRecord, read_trace
from sgl_pipeline.simulator.forecasts import part_samples
from sgl_pipeline.simulator.kernel_costs import DEVICES, part_seconds
from sgl_pipeline.simulator.models import MODELS
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.step_work import StepWork

TABLES = (
    ("a100-80g", "Qwen2.5-14B"),
    ("a100-80g", "Qwen2.5-32B"),
    ("h100", "Qwen2.5-32B"),
    ("rtxpro6000", "Qwen3-32B"),
)
HELD_OUT_SHARE = 0.2
STRAIGHT = (1.0,)
PLANNED_STEPS = 5000


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Errors as shares of what was measured; `bias` is signed."""

    source: str
    lines: str
    part: str
    num_steps: int
    mean: float
    median: float
    p95: float
    bias: float

    def cells(self) -> list[str]:
        shares = (self.mean, self.median, self.p95, self.bias)
        return [self.source, self.lines, self.part, str(self.num_steps)] + [
            f"{100 * share:.2f} %" for share in shares
        ]


def error_rows(source: str, samples: Sequence[PartSample], kinds: Sequence[int]) -> list[ErrorRow]:
    """Both fits of four fifths of `samples`, judged on the last fifth."""
    fitted = len(samples) - int(HELD_OUT_SHARE * len(samples))
    rows = []
    for lines, curve_rows in (("curves", CURVE_ROWS), ("straight", STRAIGHT)):
        costs = fit_parts(samples[:fitted], kinds, curve_rows)
        rows += _judge(source, lines, costs, samples[fitted:])
    return rows


def _judge(
    source: str, lines: str, costs: StepCosts, samples: Sequence[PartSample]
) -> list[ErrorRow]:
    predictor = StepPredictor(costs)
    groups: dict[str, list[float]] = {}
    for sample in samples:
        parts, work = predictor.parts_ms(sample.work), sample.work
        off = parts.layer_ms / sample.kinds_ms[0] - 1.0
        kind = "mixed" if work.decodes < work.tokens and work.decodes else "decodes"
        groups.setdefault("layer", []).append(off)
        groups.setdefault(f"layer, {kind if work.decodes else 'prompts'}", []).append(off)
        if work.samples:
            groups.setdefault("tail", []).append(parts.tail_ms / sample.tail_ms - 1.0)
    return [_row(source, lines, part, offs) for part, offs in sorted(groups.items())]


def _row(source: str, lines: str, part: str, offs: Sequence[float]) -> ErrorRow:
    sizes = np.abs(offs)
    return ErrorRow(
        source,
        lines,
        part,
        len(offs),
        float(np.mean(sizes)),
        float(np.median(sizes)),
        float(np.percentile(sizes, 95)),
        float(np.mean(offs)),
    )


def trace_rows(
    records: Sequence[StepRecord], layer_counts: tuple[int, ...], costs: StepCosts
) -> list[ErrorRow]:
    """Errors for whole stages of a served run: by `costs` as they are and times what the planner
    took for the stages' speeds just then, and by what it fitted to the steps before."""
    plan = StagePlan(0, layer_counts)
    rows = []
    for lines, given in (("curves", StepPredictor(costs)), ("fitted while running", None)):
        forecast = StepForecast(plan, given)
        plain: list[list[float]] = [[] for _ in layer_counts]
        sped: list[list[float]] = [[] for _ in layer_counts]
        for record in records:
            if forecast.predictor is not None:
                parts = forecast.predictor.parts_ms(record.work)
                times_ms = forecast.predictor.stage_times_ms(parts, layer_counts)
                for stage, timing in enumerate(record.stages):
                    plain[stage].append(times_ms[stage] / timing.compute_ms - 1.0)
                    by_speed = times_ms[stage] * forecast.speeds[stage]
                    sped[stage].append(by_speed / timing.compute_ms - 1.0)
            forecast.note(record)
        for stage, offs in enumerate(plain):
            rows.append(_row("served run", lines, f"stage {stage}", offs))
        for stage, offs in enumerate(sped):
            rows.append(_row("served run", lines, f"stage {stage}, with its speed", offs))
    return rows


def table_samples(device: str, model: str, num_steps: int) -> list[PartSample]:
    """Times of random steps by a kernel table, interpolated between its points."""
    seconds = part_seconds(DEVICES[device], MODELS[model])
    return part_samples(seconds, map(StepShape.made_up, random_steps(num_steps, 16384, seed=1)))


def prediction_us(predictor: StepPredictor) -> float:
    """Microseconds of one call, the least of several loops."""
    works = [step.work for step in random_steps(200, 4096, seed=2)]

    def once() -> None:
        for work in works:
            predictor.parts_ms(work)

    return _least_us(once, len(works))


def planning_us(costs: StepCosts, num_stages: int, knows_costs: bool) -> tuple[float, float]:
    """Microseconds of processor time that a step costs the planner: on average, at the most."""
    predictor, rng = StepPredictor(costs), random.Random(3)
    num_layers = len(costs.layer_weights)
    base, more = divmod(num_layers, num_stages)
    plan = StagePlan(0, tuple(base + (stage < more) for stage in range(num_stages)))
    records = [_record(step, predictor, plan, rng) for step in random_steps(500, 4096, seed=4)]
    forecast = StepForecast(plan, predictor if knows_costs else None)
    planner = LayerPlanner(PlannerArgs(), plan, forecast)
    times = []
    for number in range(PLANNED_STEPS):
        start_s = time.thread_time()
        parts = forecast.note(records[number % len(records)])
        if parts is not None:
            planner.note(parts)
        planner.proposal(plan.layer_counts)
        times.append(time.thread_time() - start_s)
    return 1e6 * sum(times) / len(times), 1e6 * max(times)


def _record(
    step: MadeUpStep, predictor: StepPredictor, plan: StagePlan, rng: random.Random
) -> StepRecord:
    times_ms = predictor.stage_times_ms(predictor.parts_ms(step.work), plan.layer_counts)
    return made_up_record(step.work, [one * rng.uniform(0.9, 1.1) for one in times_ms], plan.epoch)


def made_up_record(
    work: StepWork, stages_ms: Sequence[float], epoch: int = 0, step_id: int = 0
) -> StepRecord:
    """The step as stages that took so long would have reported it."""
    return StepRecord(
        step_id=step_id,
        epoch=epoch,
        prefill_tokens=work.tokens - work.decodes,
        decodes=work.decodes,
        samples=work.samples,
        attended_tokens=work.decode_attended_tokens + work.prefill_attended_tokens,
        decode_attended_tokens=work.decode_attended_tokens,
        waiting_tokens=0,
        running_decodes=work.decodes,
        free_page_share=0.5,
        prefill_budget=0,
        decode_budget=0,
        bound_by="",
        scheduled_s=0.0,
        finished_s=1.0,
        schedule_ms=0.0,
        result_ms=0.0,
        stages=tuple(
            StageTiming(0.0, 0.0, 0.0, 1.0, 1.0 + ms * 1e-3, 1.0 + ms * 1e-3, 1.0 + ms * 1e-3)
            for ms in stages_ms
        ),
    )


def _least_us(call: Callable[[], None], num_calls: int) -> float:
    times = []
    for _ in range(20):
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return 1e6 * min(times) / num_calls


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=3)
    command.add("model")
    command.add("--name", help="of the model in the result; by default its directory")
    command.add("--pp", type=int, default=2)
    command.add("--dtype", default="auto")
    command.add("--steps", type=int, default=300)
    command.add("--trace", help="of a server with this model on this machine")
    command.add("--layer-counts", help="of the server that wrote the trace, such as 8,8")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    require(
        (options.trace is None) == (options.layer_counts is None),
        "--trace and --layer-counts go together",
    )
    path = find_model(options.model, None, None)
    spec = read_model_spec(path)
    stages = StageArgs(
        num_stages=options.pp, model_path=path, dtype=resolve_dtype(options.dtype, spec.dtype)
    )
    file, samples = fit_costs(stages, spec, options.steps, options.rounds, seed=0)
    kinds = [0] * spec.num_layers
    rows = error_rows(f"this machine, {options.name or file.model}", samples, kinds)
    for device, model in TABLES:
        made_up = table_samples(device, model, 600)
        rows += error_rows(f"{device} table, {model}", made_up, [0] * MODELS[model].num_layers)
    predictor_us = prediction_us(StepPredictor(file.costs))
    planning = [
        [f"{'costs known' if known else 'fitted while running'}, {stages} stages, {layers} layers"]
        + [f"{us:.1f}" for us in planning_us(_with_layers(file.costs, layers), stages, known)]
        for layers, stages in ((16, 2), (16, 4), (64, 4), (80, 8))
        for known in (True, False)
    ]
    if options.trace is not None:
        counts = tuple(int(count) for count in options.layer_counts.split(","))
        rows += trace_rows(list(read_trace(options.trace)), counts, file.costs)
    heads = ["times of", "fit", "part", "steps", "mean error", "median", "95th percentile", "bias"]
    facts = {
        "fit": {
            "steps": str(options.steps),
            "held out": f"{HELD_OUT_SHARE:.0%}",
            "rounds": str(options.rounds),
            "dtype": file.dtype,
            "threads": str(file.threads),
        }
    }
    record = {
        "errors": [row.cells() for row in rows],
        "prediction_us": predictor_us,
        "planning_us": planning,
        "costs": msgspec.to_builtins(file.costs),
    }
    texts = [
        "Errors on held-out steps, as shares of what was measured.",
        markdown_table(heads, [row.cells() for row in rows]),
        f"A prediction of one step takes {predictor_us:.2f} us.",
        markdown_table(["planner, us of processor time a step", "mean", "most"], planning),
    ]
    return Report(name="predictor_error", texts=texts, facts=facts, record=record)


def _with_layers(costs: StepCosts, num_layers: int) -> StepCosts:
    return StepCosts(costs.layer, costs.embedding, costs.tail, (1.0,) * num_layers)


if __name__ == "__main__":
    sys.exit(main())
