"""The pipeline to simulate: from fitted costs, a server's trace, or a card's kernel tables."""

import argparse

import msgspec

from sgl_pipeline.args import require
from sgl_pipeline.capacity.measured import ServerFacts
from sgl_pipeline.capacity.predicted import SimulatedServer
from sgl_pipeline.costs.step_costs import CostFile
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.layer_partition import parse_layer_partition
from sgl_pipeline.managers.planning.cost_files import model_name
from sgl_pipeline.managers.planning.fit_command import stages_of
from sgl_pipeline.managers.planning.plan_command import chosen_costs
from sgl_pipeline.managers.planning.stage_flags import stage_words
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec
from sgl_pipeline.simulator.experiment import Cluster, MeasuredPipeline
from sgl_pipeline.simulator.predicted_pipeline import PredictedPipeline


def pipeline_of(options: argparse.Namespace, facts: ServerFacts | None) -> SimulatedServer:
    """The pipeline to simulate; `facts` are of the server beside it.

    Raises ConfigurationError where nothing is known of its step times.
    """
    pool_tokens = options.max_total_tokens
    if facts is not None:
        pool_tokens = facts.pool_tokens
        options = argparse.Namespace(**(vars(options) | {"pp": facts.num_stages}))
    if options.device is not None:
        return Cluster(
            model=options.model,
            device=options.device,
            quantization=options.quantization or "none",
            kv_cache_dtype=options.kv_cache_dtype,
            link=options.link,
            num_stages=options.pp,
            pool_tokens=pool_tokens,
        )
    require(
        pool_tokens is not None,
        "say how many tokens the KV pool holds, --max-total-tokens: a server logs it at its start, "
        "and `sgl-pipeline plan` shows it",
    )
    if options.calibrate is not None:
        return _recorded(options, pool_tokens)
    return _fitted(options, facts, pool_tokens)


def require_source(options: argparse.Namespace) -> None:
    """Before a server is started: raises ConfigurationError where nothing would be known of its
    step times."""
    require(options.device is None, "--device is a card elsewhere; leave it out with --measure")
    if options.calibrate is not None:
        _recorded(options, pool_tokens=1)
    else:
        _fit_of(options)


def _recorded(options: argparse.Namespace, pool_tokens: int) -> MeasuredPipeline:
    pipeline = MeasuredPipeline(trace_path=options.calibrate, pool_tokens=pool_tokens)
    try:
        recorded = pipeline.num_stages
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"--calibrate cannot be read: {error}") from None
    require(
        recorded == options.pp,
        f"{options.calibrate} is of {recorded} stages, this pipeline has {options.pp}",
    )
    return pipeline


def _fit_of(options: argparse.Namespace) -> tuple[CostFile, ModelSpec]:
    stages, spec = stages_of(_on_cpu(options))
    file = chosen_costs(options.costs, stages, spec)
    if file is None:
        words = " ".join([f"--model {options.model} --pp {options.pp}", *stage_words(options)])
        raise ConfigurationError(
            f"nothing is known of the step times of {model_name(stages.model_path)} in "
            f"{stages.precision}: measure them (`sgl-pipeline fit {words}`), or name a server's "
            "trace (--calibrate) or a card (--device)"
        )
    require(
        options.pp <= spec.num_layers,
        f"--pp {options.pp} is more than the model's {spec.num_layers} layers",
    )
    return file, spec


def _fitted(
    options: argparse.Namespace, facts: ServerFacts | None, pool_tokens: int
) -> PredictedPipeline:
    file, spec = _fit_of(options)
    counts: tuple[int, ...] = ()
    if facts is not None:
        counts = tuple(facts.layer_partition)
    elif options.pp_layer_partition is not None:
        plan = parse_layer_partition(options.pp_layer_partition, options.pp, spec.num_layers)
        counts = () if plan is None else plan.layer_counts
    return PredictedPipeline(
        costs=file.costs, num_stages=options.pp, pool_tokens=pool_tokens, layer_counts=counts
    )


def vocab_size_of(options: argparse.Namespace) -> int:
    """The vocabulary of the served model. Raises ConfigurationError as `stages_of`."""
    return stages_of(_on_cpu(options))[1].vocab_size


def _on_cpu(options: argparse.Namespace) -> argparse.Namespace:
    """The options as `stages_of` reads them: its `device` is not a card's name."""
    return argparse.Namespace(**{**vars(options), "device": "cpu"})
