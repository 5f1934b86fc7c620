"""The few flags that must be known before SGLang is imported: which host this is, of how many.

On the head the whole command line is checked later; the other hosts get the same one, and their
agents need nothing else of it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_pipeline.args import ClusterArgs, StageArgs
from sgl_pipeline.args.flags import add_early_flags, option_name, read_section
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.model_directory import weight_format


@dataclass(frozen=True, slots=True)
class EarlyOptions:
    """`model`, `revision` and `cache_dir` are what `find_model` wants."""

    cluster: ClusterArgs
    model: str | None
    revision: str | None
    cache_dir: str | None
    load_format: str
    num_stages: int
    device: str
    cpu_threads: int | None


def read_early_options(argv: Sequence[str]) -> EarlyOptions | None:
    """A rough reading of `argv`: of flags that are written in full. None where it makes no sense:
    SGLang's parser will explain that.

    Raises ConfigurationError for flags of the cluster that do not go together.
    """
    parser = _parser()
    try:
        options, _ = parser.parse_known_args(argv)
        if options.config is not None:
            parser.set_defaults(**_read_config(options.config))
            options, _ = parser.parse_known_args(argv)
    except (argparse.ArgumentError, SystemExit):
        return None
    return EarlyOptions(
        read_section(ClusterArgs, options),
        options.model_path,
        options.revision,
        options.download_dir,
        weight_format(options.load_format, options.model_path),
        options.pp_size,
        options.device,
        options.cpu_threads_per_stage,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_early_flags(parser, ClusterArgs)
    add_early_flags(parser, StageArgs, "model_path", "load_format", "num_stages", "device")
    add_early_flags(parser, StageArgs, "cpu_threads")
    # SGLang's, of which `args/` keeps nothing.
    for name in ("--config", "--revision", "--download-dir"):
        parser.add_argument(name)
    return parser


def _read_config(path: str) -> dict[str, Any]:
    """The same flags from a `--config` file, which SGLang reads as YAML."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--config {path}: {error}") from error
    dests = {
        option_name(name): action.dest
        for action in _parser()._actions
        for name in action.option_strings
        if action.dest != "config"
    }
    flags = {str(key).replace("-", "_"): value for key, value in (content or {}).items()}
    return {dests[name]: value for name, value in flags.items() if name in dests}
