"""The pipeline to simulate: from fitted costs, a server's trace, or a card's kernel tables."""

import argparse

from sgl_pipeline.args import require
from sgl_pipeline.capacity.measured import ServerFacts
from sgl_pipeline.capacity.predicted import SimulatedServer
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.layer_partition import parse_layer_partition
from sgl_pipeline.managers.planning.cost_files import model_name
from sgl_pipeline.managers.planning.fit_command import stages_of
from sgl_pipeline.managers.planning.plan_command import chosen_costs
from sgl_pipeline.managers.planning.stage_flags import stage_words
from sgl_pipeline.simulator.experiment import Cluster, MeasuredPipeline
from sgl_pipeline.simulator.predicted_pipeline import PredictedPipeline


def pipeline_of(options: argparse.Namespace, facts: ServerFacts | None) -> SimulatedServer:
    """The pipeline to simulate; `facts` are of the server beside it.

    Raises ConfigurationError where nothing is known of its step times.
    """
    pool_tokens = options.max_total_tokens if facts is None else facts.pool_tokens
    if options.device is not None:
        require(facts is None, "--device is a card elsewhere; leave it out with --measure")
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
        return _recorded(options, facts, pool_tokens)
    return _fitted(options, facts, pool_tokens)


def _recorded(
    options: argparse.Namespace, facts: ServerFacts | None, pool_tokens: int
) -> MeasuredPipeline:
    pipeline = MeasuredPipeline(trace_path=options.calibrate, pool_tokens=pool_tokens)
    num_stages = options.pp if facts is None else facts.num_stages
    try:
        recorded = pipeline.num_stages
    except OSError as error:
        raise ConfigurationError(
            f"--calibrate {options.calibrate} cannot be read: {error.strerror}"
        ) from None
    require(
        recorded == num_stages,
        f"{options.calibrate} is of {recorded} stages, this pipeline has {num_stages}",
    )
    return pipeline


def _fitted(
    options: argparse.Namespace, facts: ServerFacts | None, pool_tokens: int
) -> PredictedPipeline:
    stages, spec = stages_of(_on_cpu(options))
    file = chosen_costs(options.costs, stages, spec)
    if file is None:
        words = " ".join([f"--model {options.model} --pp {options.pp}", *stage_words(options)])
        raise ConfigurationError(
            f"nothing is known of the step times of {model_name(stages.model_path)} in "
            f"{stages.precision}: measure them (`sgl-pipeline fit {words}`), or name a server's "
            "trace (--calibrate) or a card (--device)"
        )
    num_stages = options.pp if facts is None else facts.num_stages
    require(
        num_stages <= spec.num_layers,
        f"--pp {num_stages} is more than the model's {spec.num_layers} layers",
    )
    counts: tuple[int, ...] = ()
    if facts is not None:
        counts = tuple(facts.layer_partition)
    elif options.pp_layer_partition is not None:
        plan = parse_layer_partition(options.pp_layer_partition, num_stages, spec.num_layers)
        counts = () if plan is None else plan.layer_counts
    return PredictedPipeline(
        costs=file.costs, num_stages=num_stages, pool_tokens=pool_tokens, layer_counts=counts
    )


def vocab_size_of(options: argparse.Namespace) -> int:
    """Of the model that is served. Raises ConfigurationError as `stages_of`."""
    return stages_of(_on_cpu(options))[1].vocab_size


def _on_cpu(options: argparse.Namespace) -> argparse.Namespace:
    """The options as `stages_of` reads them: its `device` is not a card's name."""
    return argparse.Namespace(**{**vars(options), "device": "cpu"})
