"""The command line: upstream's flags and ours, turned into each side's arguments.

Upstream's parser keeps its flags and their meaning; `upstream_fields.py` says who acts on each.
Ours are declared in `args/`, by the fields that they set. Starts nothing and never guesses: a value
that cannot be honored ends in a ConfigurationError that names the flag.
"""

import argparse
import json
import logging
import math
import os
import socket
from dataclasses import dataclass

from sgl_pipeline.args import (
    HOST_BACKEND,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    MODEL_IMPLS,
    SECTIONS,
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
from sgl_pipeline.args.disaggregation_args import PAGE_LINK
from sgl_pipeline.args.flags import add_flags, read_section
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.layer_partition import parse_layer_partition
from sgl_pipeline.managers.command_line.gpu_driver import why_gpu_is_unusable
from sgl_pipeline.managers.command_line.model_choice import choose_model
from sgl_pipeline.managers.command_line.model_files import (
    find_model,
    require_tokenizer,
    resolve_dtype,
)
from sgl_pipeline.managers.command_line.store_config_text import read_store_config
from sgl_pipeline.managers.upstream.disaggregation_environment import (
    fields_of_environment,
    name_variables_of_other_transfers,
)
from sgl_pipeline.managers.upstream.openai_fields import ServedFeatures
from sgl_pipeline.managers.upstream.upstream_arguments import SglangServerArgs
from sgl_pipeline.managers.upstream.upstream_checks import (
    flag_of,
    note_flags_without_effect,
    refuse_unsupported,
    tell_role,
    upstream_defaults,
)
from sgl_pipeline.managers.upstream.upstream_environment import (
    layer_partition_of,
    name_variables_without_effect,
)
from sgl_pipeline.managers.upstream.upstream_fields import HELP, NOTED, UPSTREAM_VALUES
from sgl_pipeline.model_directory import weight_format
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, ModelSpec
from sgl_pipeline.pp_runner.model.rope_spec import YarnScaling
from sgl_pipeline.pp_runner.weights.quantization_config import W4A8_INT8

logger = logging.getLogger(__name__)

TRACING_FIELDS = ("otlp_traces_endpoint", "otlp_service_name", "trace_modules")
GRAMMAR_BACKENDS = (None, "xgrammar", "none")


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """`upstream` is SGLang's ServerArgs, resolved at pp = tp = 1; `pipeline` is all of ours.

    `context_length` is the one in force, in tokens.
    """

    upstream: SglangServerArgs
    pipeline: PipelineArgs
    context_length: int

    @property
    def features(self) -> ServedFeatures:
        return ServedFeatures(
            parses_tool_calls=self.upstream.tool_call_parser is not None,
            has_completion_template=self.upstream.completion_template is not None,
            is_disaggregated=self.pipeline.disaggregation.is_on,
        )


def parse_command_line(argv: list[str]) -> LaunchPlan:
    """The launch that `python -m sgl_pipeline.launch_server <argv>` asks for.

    Fetches the model when it is named by a hub id. Raises ConfigurationError for a value that
    cannot be honored; argparse itself ends the process for an unknown flag.
    """
    return launch_plan(_parse(argv))


def launch_plan(options: argparse.Namespace) -> LaunchPlan:
    """The launch that the options of `make_parser` ask for; as `parse_command_line` otherwise."""
    from sglang.srt.server_args import ServerArgs

    note_flags_without_effect(options)
    refuse_unsupported(options)
    name_variables_without_effect()
    options.pp_layer_partition, source = layer_partition_of(
        options.pp_layer_partition, options.pp_size
    )
    load_format = weight_format(options.load_format, options.model_path)
    model_path = find_model(options.model_path, options.revision, options.download_dir, load_format)
    if options.tokenizer_path is None:
        require_tokenizer(model_path)
    served_name = options.served_model_name or options.model_path
    pipeline, spec = _pipeline_of_model(options, model_path, load_format)
    _note_context_length(spec, options.context_length)
    stages = pipeline.stages
    if stages.kv_cache_dtype == "int8" and stages.device != "cpu":
        raise ConfigurationError(
            "--kv-cache-dtype int8 is for CPUs only; use --device cpu, or fp8_e4m3, or leave it at "
            "auto"
        )
    # It refuses partitions that do not fit, before anything starts.
    parse_layer_partition(stages.layer_partition, stages.num_stages, spec.num_layers, source)

    for name, value in UPSTREAM_VALUES.items():
        setattr(options, name, value)
    options.model_path, options.dtype = model_path, stages.dtype
    options.context_length = spec.context_length
    options.json_model_override_args = _config_of_front(spec, options.json_model_override_args)
    options.served_model_name = served_name or "sgl-pipeline-demo"
    upstream = ServerArgs.from_cli_args(options)
    try:
        upstream.resolve_once()
        upstream.check_server_args()
    except (AssertionError, ValueError, OSError) as error:
        raise ConfigurationError(f"SGLang refuses these arguments: {error}") from error
    except (AttributeError, TypeError, LookupError, RuntimeError) as error:
        # It looks at fields by the architecture's name, whether a config has them or not.
        raise ConfigurationError(
            f"SGLang's front cannot read the config of {model_path}: {type(error).__name__}: "
            f"{error!s:.200}"
        ) from error
    if pipeline.disaggregation.is_on:
        tell_role(upstream, pipeline.disaggregation)
    return LaunchPlan(upstream, pipeline, spec.context_length)


def check_port_is_free(host: str, port: int) -> None:
    """Raises ConfigurationError when the HTTP server could not listen on `host:port`."""
    if not 1 <= port <= 65535:
        raise ConfigurationError(f"--port {port} must be between 1 and 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does
            probe.bind(address)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on --host {host} --port {port}: {error.strerror or error}"
        ) from error


def make_parser(
    kind: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> argparse.ArgumentParser:
    """SGLang's flags and ours. The model is not required, because we ship one; keys and values may
    have a dtype, products a format, and pages a way, that upstream does not know. Help says what
    holds here."""
    from sglang.srt.server_args import ServerArgs

    parser = kind(prog="python -m sgl_pipeline.launch_server")
    ServerArgs.add_cli_args(parser)
    ours = {
        "kv_cache_dtype": KV_CACHE_DTYPES,
        "quantization": (W4A8_INT8,),
        "disaggregation_transfer_backend": (PAGE_LINK,),
    }
    for action in parser._actions:
        if action.dest == "model_path":
            action.required = False
        if action.dest == "pp_async_batch_depth":
            action.default = None  # to see whether it is given
        if action.dest == "disaggregation_transfer_backend":
            action.default = PAGE_LINK
        if action.dest in NOTED:
            action.help = f"No effect here: {NOTED[action.dest].text}."
        action.help = HELP.get(action.dest, action.help)
        if action.dest in ours:
            assert action.choices is not None
            known = [*action.choices]
            action.choices = [*known, *(one for one in ours[action.dest] if one not in known)]
    # SGLang's own name before 0.5.23, and still that of its documentation.
    parser.add_argument(
        "--cuda-graph-max-bs",
        dest="cuda_graph_max_bs_decode",
        type=int,
        help="As --cuda-graph-max-bs-decode.",
    )
    ours_alone = parser.add_argument_group("sgl_pipeline")
    for section in SECTIONS:
        add_flags(ours_alone, section)
    return parser


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = make_parser()
    if "--config" in argv:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

        argv = ConfigArgumentMerger(parser).merge_config_with_args(argv)
        return parser.parse_args(argv)
    options = parser.parse_args(argv)
    if options.config is not None:
        raise ConfigurationError("write --config FILE in two words, or the file is not read")
    return options


def _pipeline_of_model(
    options: argparse.Namespace, model_path: str, load_format: str
) -> tuple[PipelineArgs, ModelSpec]:
    """All sections, and the spec of the model, whose own quantization `options` get."""
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
    pipeline = read_section(
        PipelineArgs,
        options,
        stages=read_section(
            StageArgs,
            options,
            model_path=model_path,
            generic_spec=chosen.generic_spec,
            load_format=load_format,
            dtype=dtype,
            device=device,
            graphs="off" if options.disable_cuda_graph else options.stage_graphs,
        ),
        scheduling=read_section(
            SchedulingArgs,
            options,
            preemption_threshold=_preemption_threshold(options),
            waiting_timeout_s=_timeout_s("SGLANG_REQ_WAITING_TIMEOUT"),
            running_timeout_s=_timeout_s("SGLANG_REQ_RUNNING_TIMEOUT"),
        ),
        throttle=read_section(ThrottleArgs, options),
        migration=read_section(MigrationArgs, options),
        recovery=read_section(RecoveryArgs, options),
        grammars=read_section(GrammarArgs, options, enabled=options.grammar_backend != "none"),
        cluster=read_section(ClusterArgs, options),
        tiers=_tiers(options, device),
        disaggregation=_disaggregation(options),
    )
    return pipeline, chosen.spec


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


def _note_context_length(spec: ModelSpec, asked: int | None) -> None:
    """Says where a rotary embedding that depends on the length of a sequence has one for all."""
    own = spec.own_context_lengths
    if own.default == own.longest:
        return
    if asked is None:
        logger.warning(
            "serves %d tokens of context, as far as this model's rotary embedding is the same for "
            "all lengths; --context-length takes up to %d, and changes it for short prompts, too",
            own.default,
            own.longest,
        )
    elif asked > own.default:
        logger.warning(
            "--context-length %d is more than %d: all prompts, short ones too, have the rotary "
            "embedding that this model uses for sequences of %d tokens",
            asked,
            own.default,
            asked,
        )


def _config_of_front(spec: ModelSpec, overrides: str) -> str:
    """`--json-model-override-args` of upstream, which takes `max_position_embeddings` for the whole
    context of YaRN, whatever its factor is."""
    if not isinstance(spec, DecoderSpec) or not isinstance(spec.rope.scaling, YarnScaling):
        return overrides
    longest = {"max_position_embeddings": spec.own_context_lengths.longest}
    return json.dumps({**json.loads(overrides), **longest})


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
