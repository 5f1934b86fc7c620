"""Converts a checkpoint of `make_model` to the form that OpenVINO reads.

    python -m benchmark.models.make_openvino build/models/0.27b build/models/0.27b-openvino-int8 \\
        --weights int8

Run by hand, once for each format; `optimum-cli` of the environment of `install_openvino` does it,
without data: 8 bits by the channel, 4 bits symmetric in groups of 128, embedding and head in 8.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from benchmark.peers.install_openvino import openvino_python
from benchmark.support.command import Command, Options
from benchmark.support.paths import OPENVINO_DIRECTORY
from sgl_pipeline.args import require
from sgl_pipeline.errors import ConfigurationError

# As `optimum-cli export openvino` wants them. It knows no bf16; whoever computes rounds fp16 to it.
WEIGHTS = {
    "fp16": ("--weight-format", "fp16"),
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--sym", "--group-size", "128", "--ratio", "1.0"),
}


def make_openvino(source: Path, target: Path, weights: str) -> None:
    """Writes `source` into the new directory `target` with weights of that one of `WEIGHTS`.

    Raises ConfigurationError where OpenVINO is missing or fails.
    """
    # An interrupted write must not look like a model.
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    program = openvino_python(OPENVINO_DIRECTORY).with_name("optimum-cli")
    command: list[str | Path] = [program, "export", "openvino", "--model", source]
    command += ["--task", "text-generation-with-past", *WEIGHTS[weights], partial]
    if subprocess.run(command).returncode != 0:
        raise ConfigurationError(f"{source} could not be converted; optimum-cli says why above")
    partial.rename(target)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, saves=False)
    command.add("source", type=Path, help="directory of a bf16 checkpoint")
    command.add("target", type=Path, help="directory to write, which must not exist")
    command.add("--weights", choices=WEIGHTS, required=True)
    return command.run(_write, argv)


def _write(options: Options) -> None:
    require(not options.target.exists(), f"{options.target} exists already")
    require((options.source / "config.json").exists(), f"{options.source} holds no config.json")
    make_openvino(options.source, options.target, options.weights)
    num_bytes = sum(path.stat().st_size for path in options.target.iterdir())
    print(f"{options.target}: {num_bytes / 2**20:.0f} MiB")


if __name__ == "__main__":
    sys.exit(main())
