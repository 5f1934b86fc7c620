"""The command line: upstream's flags and ours, turned into each side's arguments.

Upstream's parser keeps its flags and their meaning; `upstream_fields.py` says who acts on each.
Ours are declared in `args/`, by the fields that they set. Starts nothing and never guesses: a value
that cannot be honored ends in a ConfigurationError that names the flag.
"""

import argparse
import logging
import socket
from dataclasses import dataclass
from pathlib import Path

from sgl_pipeline.args import KV_CACHE_DTYPES, SECTIONS, PipelineArgs
from sgl_pipeline.args.disaggregation_args import PAGE_LINK
from sgl_pipeline.args.flags import add_flags
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.command_line.model_files import find_model, require_tokenizer
from sgl_pipeline.managers.command_line.pipeline_args import pipeline_of_model
from sgl_pipeline.managers.upstream.openai_fields import ServedFeatures
from sgl_pipeline.managers.upstream.upstream_arguments import SglangServerArgs
from sgl_pipeline.managers.upstream.upstream_checks import (
    note_flags_without_effect,
    refuse_unsupported,
    tell_drafts,
    tell_role,
)
from sgl_pipeline.managers.upstream.upstream_environment import (
    layer_partition_of,
    name_variables_without_effect,
)
from sgl_pipeline.managers.upstream.upstream_fields import HELP, NOTED, UPSTREAM_VALUES
from sgl_pipeline.model_directory import read_json_object, weight_format
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, ModelSpec
from sgl_pipeline.pp_runner.model.rope_overrides import overrides_of_front
from sgl_pipeline.pp_runner.model.rope_spec import YarnScaling
from sgl_pipeline.pp_runner.weights.quantization_config import W4A8_INT8

logger = logging.getLogger(__name__)


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
    pipeline, spec = pipeline_of_model(options, model_path, load_format, source)
    _note_context_length(spec, options.context_length)
    stages = pipeline.stages
    if stages.kv_cache_dtype == "int8" and stages.device != "cpu":
        raise ConfigurationError(
            "--kv-cache-dtype int8 is for CPUs only; use --device cpu, or fp8_e4m3, or leave it at "
            "auto"
        )

    for name, value in UPSTREAM_VALUES.items():
        setattr(options, name, value)
    if pipeline.scheduling.num_state_slots:
        # Upstream's own cache of states, which is not used, wants this on CPUs.
        options.disable_overlap_schedule = True
    options.model_path, options.dtype = model_path, stages.dtype
    options.context_length = spec.context_length
    options.json_model_override_args = _config_of_front(
        spec, model_path, options.json_model_override_args
    )
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
    if pipeline.scheduling.draft_tokens:
        tell_drafts(upstream, pipeline.scheduling.draft_tokens)
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

    # Of 600 flags argparse would print hundreds of lines before an error.
    usage = "%(prog)s [--flag value ...]; --help lists all flags"
    parser = kind(prog="python -m sgl_pipeline.launch_server", usage=usage)
    ServerArgs.add_cli_args(parser)
    ours = {
        "kv_cache_dtype": KV_CACHE_DTYPES,
        "quantization": (W4A8_INT8,),
        "disaggregation_transfer_backend": (PAGE_LINK,),
    }
    for action in parser._actions:
        if action.dest == "model_path":
            action.required = False
        if action.dest in ("pp_async_batch_depth", "mamba_track_interval"):
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


def _config_of_front(spec: ModelSpec, model_path: str, overrides: str) -> str:
    """`--json-model-override-args` of upstream, which takes `max_position_embeddings` for the whole
    context of YaRN, whatever its factor is."""
    if not isinstance(spec, DecoderSpec):
        return overrides
    is_yarn = isinstance(spec.rope.scaling, YarnScaling)
    longest = spec.own_context_lengths.longest if is_yarn else None
    config = read_json_object(Path(model_path) / "config.json")
    return overrides_of_front(config, overrides, longest)
