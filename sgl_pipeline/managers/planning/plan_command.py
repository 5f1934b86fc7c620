"""Shows what a layer split would be like, and which is best: `python -m sgl_pipeline plan`.

Times are of one made-up step, from the costs that `sgl_pipeline.migration.fit` has saved for this
model, or else measured by a stage worker for a moment, as a server's start does. Memory and pages
are computed from the model's shapes.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sgl_pipeline.args import SchedulingArgs, StageArgs
from sgl_pipeline.errors import ConfigurationError, SglPipelineError
from sgl_pipeline.layer_partition import even_layer_counts, parse_layer_partition
from sgl_pipeline.managers.planning.cost_files import find_costs, model_name, read_costs
from sgl_pipeline.managers.planning.devices import parse_devices
from sgl_pipeline.managers.planning.fit_command import stages_of
from sgl_pipeline.managers.planning.measuring import measuring_worker
from sgl_pipeline.managers.planning.split_report import SplitForecast, SplitPlanner
from sgl_pipeline.managers.stages.stage_processes import stage_threads
from sgl_pipeline.migration.cost_model import predicted_costs
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec
from sgl_pipeline.stage_costs import TYPICAL_STEP, MadeUpStep, PartSizes, StageCosts
from sgl_pipeline.step_costs import CostFile


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0, or 1 after an error."""
    options = _parse(argv)
    try:
        print(_report(options))
    except SglPipelineError as error:
        print(f"sgl_pipeline: error: {error}", file=sys.stderr)
        return 1
    return 0


def _report(options: argparse.Namespace) -> str:
    stages, spec = stages_of(options)
    stages = replace(stages, memory_fraction=options.mem_fraction_static)
    wanted = options.layer_counts
    asked = None if wanted is None else parse_layer_partition(wanted, options.pp, spec.num_layers)
    if options.pp > spec.num_layers:
        raise ConfigurationError(
            f"--pp {options.pp} is more than the model's {spec.num_layers} layers"
        )
    step = _step(options.step).within(spec.context_length)
    file = _cost_file(options.costs, stages, spec)
    costs, sizes, host_bytes = _measure(stages, spec, step, file)
    devices = parse_devices(options.devices, options.pp, host_bytes, stages.memory_fraction)
    planner = SplitPlanner(costs, sizes, devices)
    source = f"fitted on {file.machine}, {file.date}" if file else "measured now"
    lines = [
        f"{model_name(stages.model_path)}, {stages.dtype}: a step of {step}; times {source}",
        "",
    ]
    even = even_layer_counts(spec.num_layers, options.pp)
    if asked is not None:
        lines += [*describe("asked for", planner.forecast(asked.layer_counts)), ""]
    lines += [*describe("even", planner.forecast(even)), ""]
    best = planner.fastest(options.max_total_tokens)
    lines += describe("best", best)
    roomy = planner.roomiest(options.max_total_tokens)
    if roomy.num_pages > best.num_pages:
        lines += ["", *describe("more room for pages, hardly slower", roomy)]
    return "\n".join(lines)


def describe(name: str, split: SplitForecast) -> list[str]:
    """A split as lines of text."""
    counts = ",".join(map(str, split.layer_counts))
    room = f"{split.num_tokens:,} KV tokens" if split.num_pages >= 1 else "does not fit"
    lines = [f"{name}: {counts}  slowest stage {split.slowest_ms:.2f} ms, {room}"]
    for number, stage in enumerate(split.stages):
        pages = f"{stage.num_pages:,} pages" if stage.num_pages >= 1 else "no room for pages"
        lines.append(
            f"  stage {number}: layers {stage.layers.start}-{stage.layers.stop - 1}, "
            f"{stage.time_ms:.2f} ms, weights {_gib(stage.weight_bytes)} of "
            f"{_gib(stage.memory_bytes)}, {pages}"
        )
    return lines


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _step(text: str | None) -> MadeUpStep:
    if text is None:
        return TYPICAL_STEP
    try:
        decodes, context, prompt = (int(part) for part in text.split(","))
    except ValueError:
        decodes = context = prompt = -1
    if min(decodes, context, prompt) < 0 or decodes + prompt < 1:
        raise ConfigurationError(
            f"--step {text}: write decodes, context tokens of each and prompt tokens, such as "
            "32,512,144"
        )
    return MadeUpStep(decodes, context, prompt)


def _cost_file(path: Path | None, stages: StageArgs, spec: ModelSpec) -> CostFile | None:
    """The file that was named, or the one that was saved for these stages, if any."""
    if path is None:
        return find_costs(stages, spec.num_layers)
    return read_costs(
        path,
        model=model_name(stages.model_path),
        num_layers=spec.num_layers,
        dtype=stages.dtype,
        device=stages.device,
        threads=stage_threads(stages.num_stages, stages.cpu_threads)[0],
    )


def _measure(
    stages: StageArgs, spec: ModelSpec, step: MadeUpStep, file: CostFile | None
) -> tuple[StageCosts, PartSizes, int]:
    """Costs of the step, the parts' bytes, and what memory this machine has for them."""
    with measuring_worker(stages, spec.num_layers) as worker:
        found = worker.measure([] if file else [step])
    if file is None:
        return StageCosts.of(found.kinds, found.samples[0]), found.sizes, found.memory_bytes
    costs = predicted_costs(StepPredictor(file.costs), step.work)
    return costs, found.sizes, found.memory_bytes


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_pipeline plan", description="Shows layer splits; starts no server."
    )
    parser.add_argument("--model", "--model-path", required=True, help="directory or hub id")
    parser.add_argument("--pp", type=int, default=2, help="number of stages")
    parser.add_argument(
        "--devices",
        help="of the stages, such as cpu,cpu:0.5 or 80GiB,24GiB:0.4: memory, and speed beside the "
        "device that was measured",
    )
    parser.add_argument("--layer-counts", help="a split to show, such as 5,4,4,3")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="to measure on")
    parser.add_argument("--costs", type=Path, help="file of sgl_pipeline.migration.fit")
    parser.add_argument("--cpu-threads-per-stage", type=int)
    parser.add_argument(
        "--max-total-tokens", type=int, default=SchedulingArgs().page_size, help="KV, at least"
    )
    parser.add_argument("--mem-fraction-static", type=float, default=0.88)
    parser.add_argument("--step", help="decodes,context,prompt tokens; by default 32,512,144")
    return parser.parse_args(argv)
