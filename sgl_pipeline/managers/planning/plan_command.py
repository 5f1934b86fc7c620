"""Shows the times, weights and pages of a layer split, and the best split: `python -m sgl_pipeline
plan`.

Times are of one made-up step, from the costs that `sgl-pipeline fit` has saved for this
model, or else measured by a stage worker for a moment, as a server's start does. Memory and pages
are computed from the model's shapes.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from sgl_pipeline.args import SchedulingArgs, StageArgs
from sgl_pipeline.costs.stage_costs import TYPICAL_STEP, MadeUpStep, PartSizes, StageCosts
from sgl_pipeline.costs.step_costs import CostFile
from sgl_pipeline.errors import ConfigurationError, SglPipelineError
from sgl_pipeline.host_network import HostNetwork, read_host_network
from sgl_pipeline.layer_partition import even_layer_counts, parse_layer_partition
from sgl_pipeline.managers.planning.cost_files import find_costs, model_name, read_costs
from sgl_pipeline.managers.planning.devices import parse_devices
from sgl_pipeline.managers.planning.fit_command import stages_of
from sgl_pipeline.managers.planning.hosts_report import (
    HostPlanner,
    describe_route,
    start_lines,
)
from sgl_pipeline.managers.planning.measuring import measuring_worker
from sgl_pipeline.managers.planning.split_report import SplitForecast, SplitPlanner
from sgl_pipeline.managers.planning.stage_flags import add_slots_flag, add_stage_flags
from sgl_pipeline.managers.stages.stage_processes import stage_threads
from sgl_pipeline.migration.cost_model import predicted_costs
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec
from sgl_pipeline.stage_plan import StagePlan


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0, or 1 after an error."""
    options = make_parser().parse_args(argv)
    try:
        print(_report(options))
    except SglPipelineError as error:
        print(f"sgl_pipeline: error: {error}", file=sys.stderr)
        return 1
    return 0


def _report(options: argparse.Namespace) -> str:
    network = None if options.hosts is None else read_host_network(options.hosts)
    options.pp = _stages_here(options, network)
    stages, spec = stages_of(options, options.max_mamba_cache_size)
    stages = replace(stages, memory_fraction=options.mem_fraction_static)
    wanted = options.layer_counts
    asked = None if wanted is None else parse_layer_partition(wanted, options.pp, spec.num_layers)
    num_stages = options.pp if network is None else network.num_stages
    if num_stages > spec.num_layers:
        raise ConfigurationError(
            f"--pp {num_stages} is more than the model's {spec.num_layers} layers"
        )
    step = _step(options.step).within(spec.context_length)
    file = chosen_costs(options.costs, stages, spec)
    costs, sizes, host_bytes = step_costs_here(stages, spec, step, file)
    source = f"fitted on {file.machine}, {file.date}" if file else "measured now"
    lines = [
        f"{model_name(stages.model_path)}, {stages.precision}: a step of {step}; times {source}"
    ]
    if sizes.state_bytes:
        lines.append(
            f"{stages.num_state_slots} state slots (--max-mamba-cache-size) take "
            f"{_gib(sizes.state_bytes * len(sizes.state_layers))} in all layers; a server takes "
            "fewer by itself where they do not fit"
        )
    lines.append("")
    if network is not None:
        row_bytes = spec.hidden_size * getattr(torch, stages.dtype).itemsize
        step_bytes = step.work.tokens * row_bytes
        host_planner = HostPlanner(
            network,
            costs,
            sizes,
            step_bytes,
            host_bytes,
            stages.memory_fraction,
            options.max_total_tokens,
            options.extra_steps_in_flight,
        )
        return "\n".join(lines + _routes(host_planner, network))
    devices = parse_devices(options.devices, options.pp, host_bytes, stages.memory_fraction)
    return "\n".join(lines + _splits(SplitPlanner(costs, sizes, devices), options, spec, asked))


def _routes(planner: HostPlanner, network: HostNetwork) -> list[str]:
    """The hosts in the listed order, if that is not the best, and the best order and split."""
    best, listed = planner.best(), planner.as_listed()
    lines = []
    if listed is not None and listed.order != best.order:
        lines += [*describe_route("as listed", planner, listed), ""]
    lines += [*describe_route("best order", planner, best), ""]
    return [*lines, *describe("its split", planner.split(best)), "", *start_lines(network, best)]


def _splits(
    planner: SplitPlanner,
    options: argparse.Namespace,
    spec: ModelSpec,
    asked: StagePlan | None,
) -> list[str]:
    """The requested split, the even one and the best ones, on one host."""
    lines: list[str] = []
    even = even_layer_counts(spec.num_layers, options.pp)
    if asked is not None:
        lines += [*describe("asked for", planner.forecast(asked.layer_counts)), ""]
    lines += [*describe("even", planner.forecast(even)), ""]
    best = planner.fastest(options.max_total_tokens)
    lines += describe("best", best)
    roomy = planner.roomiest(options.max_total_tokens)
    if roomy.num_pages > best.num_pages:
        lines += ["", *describe("more room for pages, hardly slower", roomy)]
    return lines


def _stages_here(options: argparse.Namespace, network: HostNetwork | None) -> int:
    """Number of stages that share the machine on which times are measured; with hosts, the
    head's."""
    if network is None:
        return 2 if options.pp is None else int(options.pp)
    for flag in ("--pp", "--devices", "--layer-counts"):
        value = getattr(options, flag[2:].replace("-", "_"))
        if value is not None:
            raise ConfigurationError(
                f"{flag} {value} is for one host; the file of --hosts says what hosts have"
            )
    return network.hosts[0].stages


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


def chosen_costs(path: Path | None, stages: StageArgs, spec: ModelSpec) -> CostFile | None:
    """The file that was named, or the one that was saved for these stages, if any."""
    if path is None:
        return find_costs(stages, spec.num_layers)
    return read_costs(
        path,
        model=model_name(stages.model_path),
        num_layers=spec.num_layers,
        dtype=stages.precision,
        device=stages.device,
        threads=stage_threads(stages.num_stages, stages.cpu_threads)[0],
    )


def step_costs_here(
    stages: StageArgs, spec: ModelSpec, step: MadeUpStep, file: CostFile | None
) -> tuple[StageCosts, PartSizes, int]:
    """Costs of the step, the parts' bytes, and this machine's memory for them."""
    with measuring_worker(stages, spec.num_layers) as worker:
        found = worker.measure([] if file else [step])
    if file is None:
        return StageCosts.of(found.kinds, found.samples[0]), found.sizes, found.memory_bytes
    costs = predicted_costs(StepPredictor(file.costs), step.work)
    return costs, found.sizes, found.memory_bytes


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m sgl_pipeline plan", description="Shows layer splits; starts no server."
    )
    parser.add_argument("--model", "--model-path", required=True, help="directory or hub id")
    parser.add_argument("--pp", type=int, help="number of stages; by default 2")
    parser.add_argument(
        "--devices",
        help="of the stages, such as cpu,cpu:0.5 or 80GiB,24GiB:0.4: memory, and speed beside the "
        "device that was measured",
    )
    parser.add_argument(
        "--hosts",
        type=Path,
        help="a JSON file of hosts and the links between them (sgl_pipeline/host_network.py); "
        "their stages take the place of --pp, their memory and speed that of --devices",
    )
    parser.add_argument(
        "--extra-steps-in-flight", type=int, default=0, help="of the server, with --hosts"
    )
    parser.add_argument("--layer-counts", help="a split to show, such as 5,4,4,3")
    add_stage_flags(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="to measure on")
    parser.add_argument("--costs", type=Path, help="file of sgl-pipeline fit")
    parser.add_argument(
        "--max-total-tokens", type=int, default=SchedulingArgs().page_size, help="KV, at least"
    )
    add_slots_flag(parser)
    parser.add_argument("--mem-fraction-static", type=float, default=0.88)
    parser.add_argument("--step", help="decodes,context,prompt tokens; by default 32,512,144")
    return parser
