"""Fits the costs of a model's parts on this machine: `python -m sgl_pipeline fit`.

A stage worker times a few hundred made-up steps of random sizes, part by part; a fifth of them are
held out to measure the fit's error. The result is a file that servers of this model, dtype, device
and number of threads find by themselves (`cost_files.py`).
"""

import argparse
import datetime
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from sgl_pipeline.args import StageArgs
from sgl_pipeline.costs.stage_costs import MadeUpStep, PartSample
from sgl_pipeline.costs.step_costs import CostFile
from sgl_pipeline.errors import ConfigurationError, SglPipelineError
from sgl_pipeline.managers.command_line.model_choice import choose_model
from sgl_pipeline.managers.command_line.model_files import find_model, resolve_dtype
from sgl_pipeline.managers.planning.cost_files import machine_name, model_name, save_costs
from sgl_pipeline.managers.planning.measuring import MeasuringWorker, measuring_worker
from sgl_pipeline.managers.planning.stage_flags import add_stage_flags
from sgl_pipeline.managers.stages.stage_processes import stage_threads
from sgl_pipeline.migration.step_fit import errors_on, fit_parts
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec
from sgl_pipeline.status_line import StatusLine, bar

_HELD_OUT_SHARE = 0.2
_STEPS_AT_ONCE = 8
# The largest steps that are timed: rows by the server's defaults, and pages of 128 Ki tokens.
_MOST_DECODES, _MOST_PROMPT_TOKENS, _MOST_KEPT_TOKENS = 256, 2048, 2**17
_MOST_CONTEXT = 4096


def random_steps(count: int, context_length: int, seed: int) -> list[MadeUpStep]:
    """Steps of random sizes, small ones as often as large ones: a third are decodes alone, a third
    prompts alone, a third both."""
    rng = random.Random(seed)

    def size(most: int) -> int:
        return int(most ** rng.random())

    steps = []
    for number in range(count):
        decodes = size(_MOST_DECODES) if number % 3 != 1 else 0
        prompt_tokens = size(_MOST_PROMPT_TOKENS) if number % 3 != 0 else 0
        most_context = min(_MOST_CONTEXT, _MOST_KEPT_TOKENS // max(1, decodes))
        step = MadeUpStep(
            decodes,
            size(most_context),
            prompt_tokens,
            rng.choice([0, size(_MOST_CONTEXT)]) if prompt_tokens else 0,
        )
        steps.append(step.within(context_length))
    return steps


def measure_steps(
    worker: MeasuringWorker, steps: Sequence[MadeUpStep], rounds: int
) -> tuple[tuple[int, ...], list[PartSample]]:
    """The kinds of the layers, and the least time of each part in each step; every round takes the
    steps in another order, and the time that a disturbance lasts is spread over many of them."""
    kinds: tuple[int, ...] = ()
    best: dict[int, PartSample] = {}
    line = StatusLine()
    for number in range(rounds):
        order = list(range(len(steps)))
        random.Random(number).shuffle(order)
        for start in range(0, len(order), _STEPS_AT_ONCE):
            places = order[start : start + _STEPS_AT_ONCE]
            costs = worker.measure([steps[place] for place in places])
            kinds = costs.kinds
            for place, sample in zip(places, costs.samples, strict=True):
                best[place] = least(best[place], sample) if place in best else sample
            done = start + len(places)
            line.show(f"round {number + 1} of {rounds} {bar(done, len(steps))} steps")
    line.clear()
    return kinds, [best[place] for place in range(len(steps))]


def least(one: PartSample, other: PartSample) -> PartSample:
    """The shorter times of two samples of the same step."""
    return PartSample(
        one.work,
        tuple(map(min, one.kinds_ms, other.kinds_ms)),
        min(one.embedding_ms, other.embedding_ms),
        min(one.tail_ms, other.tail_ms),
    )


def fit_costs(
    stages: StageArgs, spec: ModelSpec, num_steps: int, rounds: int, seed: int
) -> tuple[CostFile, list[PartSample]]:
    """Measures and fits; returns the samples too, the held-out ones last.

    Raises ConfigurationError and StageFailure as `MeasuringWorker.measure`.
    """
    steps = random_steps(num_steps, spec.context_length, seed)
    with measuring_worker(stages, spec.num_layers) as worker:
        kinds, samples = measure_steps(worker, steps, rounds)
    fitted = len(samples) - max(1, int(_HELD_OUT_SHARE * len(samples)))
    windows = [attention.window for attention in spec.attentions]
    costs = fit_parts(samples[:fitted], kinds, windows=windows)
    return (
        CostFile(
            model=model_name(stages.model_path),
            dtype=stages.precision,
            device=stages.device,
            threads=stage_threads(stages.num_stages, stages.cpu_threads)[0],
            machine=machine_name(stages.device),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            costs=costs,
            errors=errors_on(costs, samples[fitted:], kinds),
        ),
        samples,
    )


def stages_of(options: argparse.Namespace, num_state_slots: int = 0) -> tuple[StageArgs, ModelSpec]:
    """The stages that a command's options describe, and their model; a model with states has so
    many slots."""
    model_path = find_model(options.model, None, None)
    overrides = options.json_model_override_args
    spec, generic_spec = choose_model(
        model_path, options.quantization, options.model_impl, rope_overrides=overrides
    )
    stages = StageArgs(
        num_stages=options.pp,
        model_path=model_path,
        model_impl=options.model_impl,
        generic_spec=generic_spec,
        dtype=resolve_dtype(options.dtype, spec.dtype),
        device=options.device,
        quantization=spec.quantization_method,
        kv_cache_dtype=options.kv_cache_dtype,
        rope_overrides=overrides,
        cpu_threads=options.cpu_threads_per_stage,
        num_state_slots=num_state_slots if spec.has_states else 0,
    )
    return stages, spec


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0, or 1 after an error."""
    options = make_parser().parse_args(argv)
    try:
        if options.steps < 50 or options.rounds < 1:
            raise ConfigurationError("a fit needs --steps 50 or more and --rounds 1 or more")
        stages, spec = stages_of(options)
        costs, _ = fit_costs(stages, spec, options.steps, options.rounds, options.seed)
        path = save_costs(costs, options.output)
    except SglPipelineError as error:
        print(f"sgl_pipeline: error: {error}", file=sys.stderr)
        return 1
    assert costs.errors is not None
    print(
        f"{path}: {costs.model}, {costs.dtype}, {costs.device}, {costs.threads} threads, on "
        f"{costs.machine}\nmean error on {costs.errors.num_shapes} steps that were not fitted: "
        f"{costs.errors.layer:.1%} of a layer, {costs.errors.tail:.1%} of norm, head and sampling"
    )
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(prog="python -m sgl_pipeline fit")
    parser.add_argument("--model", "--model-path", required=True, help="directory or hub id")
    parser.add_argument("--pp", type=int, default=2, help="stages that share this machine")
    add_stage_flags(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=240, help="made-up steps to time")
    parser.add_argument("--rounds", type=int, default=2, help="the least of as many times counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="file to write, in place of the cached one")
    return parser
