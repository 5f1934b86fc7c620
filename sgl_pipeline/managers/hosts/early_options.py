"""The few flags that must be known before SGLang is imported: which host this is, of how many.

Read by `launch_server.py`. On the head the whole command line is checked later; the other hosts get
the same one, and their agents need nothing else of it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_pipeline.args import ClusterArgs, stage_load_format
from sgl_pipeline.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class EarlyOptions:
    """`model`, `revision` and `cache_dir` are what `find_model` wants."""

    cluster: ClusterArgs
    model: str | None
    revision: str | None
    cache_dir: str | None
    load_format: str
    num_stages: int
    cpu_threads: int | None


def read_early_options(argv: Sequence[str]) -> EarlyOptions | None:
    """A rough reading of `argv`; None where it makes no sense, which
    SGLang's parser will explain.

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
    cluster = ClusterArgs(
        num_hosts=options.nnodes,
        rank=options.node_rank,
        head_address=options.dist_init_addr,
        key_file=options.cluster_key_file,
        silence_s=options.host_silence_s,
        use_ray=options.use_ray,
        ray_wait_s=options.ray_wait_s,
    )
    return EarlyOptions(
        cluster,
        options.model_path,
        options.revision,
        options.download_dir,
        stage_load_format(options.load_format),
        options.pp,
        options.cpu_threads_per_stage,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--dist-init-addr", "--nccl-init-addr")
    parser.add_argument("--cluster-key-file")
    parser.add_argument("--host-silence-s", type=float, default=ClusterArgs().silence_s)
    parser.add_argument("--use-ray", action="store_true")
    parser.add_argument("--ray-wait-s", type=float, default=ClusterArgs().ray_wait_s)
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--revision")
    parser.add_argument("--download-dir")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--pp", "--pp-size", "--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--cpu-threads-per-stage", type=int)
    return parser


def _read_config(path: str) -> dict[str, Any]:
    """The same flags from a `--config` file, which SGLang reads as YAML."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--config {path}: {error}") from error
    names = {"pp_size": "pp", "pipeline_parallel_size": "pp", "nccl_init_addr": "dist_init_addr"}
    flags = {str(key).replace("-", "_"): value for key, value in (content or {}).items()}
    known = {action.dest for action in _parser()._actions} - {"config"}
    return {name: value for key, value in flags.items() if (name := names.get(key, key)) in known}
