"""The arguments of our own processes, from upstream's flags and ours.

`upstream_fields.py` names upstream's flags that they act on; ours are declared in `args/`.
"""

import argparse
import logging
import math
import os
from functools import partial

from sgl_pipeline.args import (
    HOST_BACKEND,
    LOAD_FORMATS,
    MODEL_IMPLS,
    ClusterArgs,
    DisaggregationArgs,
    GrammarArgs,
    MigrationArgs,
    PipelineArgs,
    RecoveryArgs,
    SchedulingArgs,
    StageArgs,
    ThrottleArgs,
    TierArgs,
)
from sgl_pipeline.args.checks import require_choice
from sgl_pipeline.args.flags import read_section
from sgl_pipeline.args.scheduling_args import draft_tokens_of
from sgl_pipeline.args.tenant_flags import API_KEY
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.layer_partition import even_layer_counts, parse_layer_partition
from sgl_pipeline.managers.command_line.gpu_driver import why_gpu_is_unusable
from sgl_pipeline.managers.command_line.model_choice import choose_model
from sgl_pipeline.managers.command_line.model_files import resolve_dtype
from sgl_pipeline.managers.command_line.state_slots import (
    host_loads,
    refuse_slots_without_states,
    settle_state_slots,
)
from sgl_pipeline.managers.command_line.store_config_text import read_store_config
from sgl_pipeline.managers.upstream.disaggregation_environment import (
    fields_of_environment,
    name_variables_of_other_transfers,
)
from sgl_pipeline.managers.upstream.upstream_checks import flag_of, upstream_defaults
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, ModelSpec
from sgl_pipeline.stage_plan import StagePlan

logger = logging.getLogger(__name__)

TRACING_FIELDS = ("otlp_traces_endpoint", "otlp_service_name", "trace_modules")
GRAMMAR_BACKENDS = (None, "xgrammar", "none")


def pipeline_of_model(
    options: argparse.Namespace, model_path: str, load_format: str, partition_source: str
) -> tuple[PipelineArgs, ModelSpec]:
    """All sections, and the spec of the model, whose own quantization `options` get.

    Args:
        partition_source: the flag or variable that asks for the layer partition.

    Raises ConfigurationError for a value that cannot be honored.
    """
    require_choice("--model-impl", options.model_impl, MODEL_IMPLS)
    _check_our_side(options)
    _settle_extra_steps_in_flight(options)
    device = _device(options)
    chosen = choose_model(
        model_path,
        options.quantization,
        options.model_impl,
        options.context_length,
        options.json_model_override_args,
    )
    options.quantization = chosen.spec.quantization_method
    dtype = resolve_dtype(options.dtype, chosen.spec.dtype)
    stages = read_section(
        StageArgs,
        options,
        model_path=model_path,
        generic_spec=chosen.generic_spec,
        load_format=load_format,
        dtype=dtype,
        device=device,
        graphs="off" if options.disable_cuda_graph else options.stage_graphs,
    )
    plan = parse_layer_partition(
        stages.layer_partition, stages.num_stages, chosen.spec.num_layers, partition_source
    )
    migration, cluster = read_section(MigrationArgs, options), read_section(ClusterArgs, options)
    pipeline = read_section(
        PipelineArgs,
        options,
        stages=stages,
        scheduling=read_section(
            SchedulingArgs,
            options,
            num_state_slots=_state_slots(
                options, chosen.spec, plan, stages, migration, cluster.num_hosts
            ),
            preemption_threshold=_preemption_threshold(options),
            draft_tokens=_draft_tokens(options, device),
            fair_shares_by=_fair_shares_by(options),
            waiting_timeout_s=_timeout_s("SGLANG_REQ_WAITING_TIMEOUT"),
            running_timeout_s=_timeout_s("SGLANG_REQ_RUNNING_TIMEOUT"),
        ),
        throttle=read_section(ThrottleArgs, options),
        migration=migration,
        recovery=read_section(RecoveryArgs, options),
        grammars=read_section(GrammarArgs, options, enabled=options.grammar_backend != "none"),
        cluster=cluster,
        tiers=_tiers(options, device),
        disaggregation=_disaggregation(options),
    )
    return pipeline, chosen.spec


def _state_slots(
    options: argparse.Namespace,
    spec: ModelSpec,
    plan: StagePlan | None,
    stages: StageArgs,
    migration: MigrationArgs,
    num_hosts: int,
) -> int:
    """The number of state slots; 0 without states. A split by measured times, which is not known
    yet (no `plan`), is taken to be even: with one host it does not matter."""
    if not spec.has_states:
        refuse_slots_without_states(options)
        return 0
    assert isinstance(spec, DecoderSpec), "layers of transformers' code have no states"
    if plan is None:
        plan = StagePlan(0, even_layer_counts(spec.num_layers, stages.num_stages))
    loads = partial(host_loads, spec, plan, stages, migration, num_hosts)
    running = options.max_running_requests or SchedulingArgs().max_running_requests
    return settle_state_slots(options, loads, running)


def _fair_shares_by(options: argparse.Namespace) -> str | None:
    """The flag. Raises ConfigurationError where it could tell no tenants apart."""
    by: str | None = options.fair_shares_by
    if by == API_KEY and options.api_key:
        raise ConfigurationError(
            f"--fair-shares-by {API_KEY} tells tenants by the keys that they present, and "
            "--api-key lets only one pass; leave out --api-key where a gateway checks the keys, or "
            "use --fair-shares-by user or header:NAME"
        )
    return by


def _disaggregation(options: argparse.Namespace) -> DisaggregationArgs:
    """The role of this server; variables alone give it none."""
    if options.disaggregation_mode == "null":
        return read_section(DisaggregationArgs, options)
    role = read_section(DisaggregationArgs, options, **fields_of_environment())
    name_variables_of_other_transfers()
    default = DisaggregationArgs().reserved_decode_tokens
    if role.mode == "prefill" and role.reserved_decode_tokens != default:
        logger.warning("--num-reserved-decode-tokens has no effect on a prefill server")
    if options.enable_response_store:
        raise ConfigurationError(
            f"--enable-response-store with --disaggregation-mode {role.mode}: each server would "
            "keep responses of its own; leave it out"
        )
    return role


def _tiers(options: argparse.Namespace, device: str) -> TierArgs:
    """The store beyond the pool; its variables alone do not switch it on. That of a GPU is host
    memory, unless another one is given."""
    text = options.hicache_storage_backend_extra_config
    is_on, is_on_gpu = options.enable_hierarchical_cache, device == "cuda"
    backend = options.hicache_storage_backend
    if backend is None and is_on and is_on_gpu:
        backend = HOST_BACKEND
    tiers = read_section(
        TierArgs,
        options,
        backend=backend,
        is_attachable=bool(options.admin_api_key),
        pool_is_on_gpu=is_on_gpu,
        **({"store": read_store_config(text)} if is_on or text else {}),
    )
    if not tiers.enabled:
        return tiers
    if tiers.backend is None:
        logger.warning(
            "no store is attached: pages that the pool has no room for are lost until one is, by "
            "PUT /hicache/storage-backend"
        )
    if tiers.backend != HOST_BACKEND and (options.hicache_ratio or options.hicache_size):
        logger.warning(
            "--hicache-ratio and --hicache-size have no effect here: they size host memory, a tier "
            "of --device cuda without --hicache-storage-backend"
        )
    return tiers


def _settle_extra_steps_in_flight(options: argparse.Namespace) -> None:
    ours, upstreams = options.extra_steps_in_flight, options.pp_async_batch_depth
    if ours is not None and upstreams is not None and ours != upstreams:
        raise ConfigurationError(
            f"--extra-steps-in-flight {ours} and --pp-async-batch-depth {upstreams} are two names "
            "of one number; give one of them"
        )
    options.extra_steps_in_flight = upstreams if ours is None else ours


def _preemption_threshold(options: argparse.Namespace) -> int | None:
    if not options.enable_priority_scheduling or options.disable_priority_preemption:
        return None
    return int(options.priority_scheduling_preemption_threshold)


def _draft_tokens(options: argparse.Namespace, device: str) -> int:
    """Most draft tokens of a decode; 0 without drafts."""
    algorithm, rows = options.speculative_algorithm, options.speculative_num_draft_tokens
    if algorithm is None:
        if rows is not None:
            raise ConfigurationError(
                "--speculative-num-draft-tokens does nothing without --speculative-algorithm NGRAM"
            )
        return 0
    if algorithm != "NGRAM":
        raise ConfigurationError(f"--speculative-algorithm {algorithm} is not built; choose NGRAM")
    if device != "cpu":
        raise ConfigurationError(
            "--speculative-algorithm NGRAM is for CPUs only: on a GPU one row and several go "
            "through different kernels, and tokens would depend on drafts"
        )
    return draft_tokens_of(rows)


def _timeout_s(name: str) -> float | None:
    """Seconds that upstream's environment variable `name` sets; none when it is zero or less."""
    text = os.environ.get(name, "-1")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise ConfigurationError(f"{name}={text} is not a number of seconds")
    return seconds if seconds > 0 else None


def _check_our_side(options: argparse.Namespace) -> None:
    """Bounds on upstream's flags that our processes act on."""
    if options.load_format not in LOAD_FORMATS:
        raise ConfigurationError(
            f"--load-format {options.load_format} is not supported; "
            f"choose from {', '.join(LOAD_FORMATS)}"
        )
    if options.grammar_backend not in GRAMMAR_BACKENDS:
        raise ConfigurationError(
            f"--grammar-backend {options.grammar_backend} is not supported; choose xgrammar or none"
        )
    _check_tracing(options)
    if options.stream_interval < 1:
        raise ConfigurationError(f"--stream-interval {options.stream_interval} must be at least 1")


def _check_tracing(options: argparse.Namespace) -> None:
    """Checks, before anything is started, the needs of `--enable-trace` and the flags that need
    it."""
    from sglang.srt.environ import envs
    from sglang.srt.observability.trace import opentelemetry_imported

    if not options.enable_trace:
        for name, default in upstream_defaults().items():
            if name in TRACING_FIELDS and getattr(options, name) != default:
                raise ConfigurationError(f"{flag_of(name)} does nothing without --enable-trace")
        return
    if not opentelemetry_imported:
        raise ConfigurationError(
            "--enable-trace needs OpenTelemetry: pip install --no-deps -r requirements/tracing.txt"
        )
    if envs.SGLANG_TRACE_ASYNC.get():
        raise ConfigurationError(
            "SGLANG_TRACE_ASYNC cannot be honored: it sends pickles over a socket; spans leave "
            "the scheduler process without it"
        )


def _device(options: argparse.Namespace) -> str:
    import torch

    asked, has_gpu = options.device, torch.cuda.is_available()
    if asked in (None, "auto"):
        asked = "cuda" if has_gpu else "cpu"
        if not has_gpu and (reason := why_gpu_is_unusable()) is not None:
            logger.warning("--device auto serves on the CPU: %s", reason)
    if asked not in ("cpu", "cuda"):
        raise ConfigurationError(f"--device {asked} is not supported; choose cpu or cuda")
    if asked == "cuda" and not has_gpu:
        reason = why_gpu_is_unusable() or "this PyTorch finds no CUDA device"
        raise ConfigurationError(f"--device cuda: {reason}")
    if asked == "cpu" and options.mem_fraction_static is not None:
        logger.warning(
            "--mem-fraction-static %s has no effect on a CPU: it sizes the KV pool of a GPU; use "
            "--max-total-tokens",
            options.mem_fraction_static,
        )
    return str(asked)
