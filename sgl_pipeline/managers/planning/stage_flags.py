"""The server's flags that costs hold for, as `fit`, `plan` and `doctor` take them."""

import argparse
import shlex

from sgl_pipeline.args import KV_CACHE_DTYPES, MODEL_IMPLS, SchedulingArgs


def add_stage_flags(parser: "argparse._ActionsContainer") -> None:
    """Adds the flags that `fit_command.stages_of` reads, except model, device and depth."""
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model-impl", choices=MODEL_IMPLS, default="auto")
    parser.add_argument("--quantization", help="as of the server: w8a8_int8, w4a8_int8 or fp8")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--cpu-threads-per-stage", type=int)
    parser.add_argument(
        "--json-model-override-args", default="{}", help="as of the server: rope fields, in JSON"
    )


def add_slots_flag(parser: "argparse._ActionsContainer") -> None:
    """Adds the number of state slots, for commands that say what fits."""
    parser.add_argument(
        "--max-mamba-cache-size",
        type=int,
        default=SchedulingArgs().max_running_requests,
        help="state slots that have to fit, of a model with states; by default %(default)s, as "
        "many as requests that a server runs at once where they fit",
    )


def stage_words(options: argparse.Namespace) -> list[str]:
    """The flags of `options` that are not left at their default, for a command line."""
    words = []
    if options.dtype != "auto":
        words += ["--dtype", options.dtype]
    if options.model_impl != "auto":
        words += ["--model-impl", options.model_impl]
    if options.quantization:
        words += ["--quantization", options.quantization]
    if options.kv_cache_dtype != "auto":
        words += ["--kv-cache-dtype", options.kv_cache_dtype]
    if options.cpu_threads_per_stage:
        words += ["--cpu-threads-per-stage", str(options.cpu_threads_per_stage)]
    if options.json_model_override_args != "{}":
        words += ["--json-model-override-args", shlex.quote(options.json_model_override_args)]
    return words
