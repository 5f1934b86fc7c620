"""Writes a published GGUF file as a 16-bit checkpoint, for engines that read no GGUF file.

    python -m benchmark.models.unpack_gguf build/models/smollm2 build/models/smollm2-16-bits

Run by hand, seconds for a small model. Numbers, config and tokenizer are those with which our
server serves the file in bf16.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmark.support.command import Command, Options
from sgl_pipeline.args import require
from sgl_pipeline.gguf_index import INDEX_FILE, WEIGHTS_FILE
from sgl_pipeline.pp_runner.weights.gguf_weights import GgufWeights


def unpack_gguf(source: Path, target: Path) -> None:
    """Writes the GGUF file that `source` is, or the only one in it, into the new directory
    `target`."""
    # It imports SGLang.
    from sgl_pipeline.managers.command_line.model_files import find_model, require_tokenizer

    directory = find_model(str(source), None, None)
    require_tokenizer(directory)
    served = Path(directory)
    # An interrupted write must not look like a model.
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights = GgufWeights(served, torch.bfloat16, torch.device("cpu"))
    tensors = {name: weights.read(name, weights.shape_of(name)) for name in weights.names()}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    for path in served.iterdir():
        if path.name not in (INDEX_FILE, WEIGHTS_FILE):
            shutil.copy(path, partial)
    partial.rename(target)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, saves=False)
    command.add("source", type=Path, help="a GGUF file, or the directory of one")
    command.add("target", type=Path, help="directory to write, which must not exist")
    return command.run(_write, argv)


def _write(options: Options) -> None:
    require(not options.target.exists(), f"{options.target} exists already")
    unpack_gguf(options.source, options.target)
    num_bytes = sum(path.stat().st_size for path in options.target.iterdir())
    print(f"{options.target}: {num_bytes / 2**20:.0f} MiB")


if __name__ == "__main__":
    sys.exit(main())
