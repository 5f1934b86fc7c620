"""Writes a published GGUF file as a 16-bit checkpoint, for engines that read no GGUF file.

    python -m benchmark.models.unpack_gguf build/models/smollm2 build/models/smollm2-16-bits

Run by hand, seconds for a small model. Transformers reads the file, and each number is rounded to
bf16; config and tokenizer are those with which our server serves it.
"""

import shutil
import sys
from pathlib import Path

import torch

from benchmark.support.command import Command, Options
from sgl_pipeline.args import require
from sgl_pipeline.model_directory import find_gguf_file

_TOKENIZER_FILES = ("tokenizer*", "generation_config.json", "chat_template*")


def unpack_gguf(source: Path, target: Path) -> None:
    """Writes the GGUF file that `source` is, or the only one in it, into the new directory
    `target`."""
    # Slow to import.
    from sgl_pipeline.managers.command_line.model_files import find_model
    from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

    install_torchvision_shim()
    from transformers import AutoModelForCausalLM

    path = find_gguf_file(source)
    # An interrupted write must not look like a model.
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.bfloat16
    )
    model.save_pretrained(partial)
    served = Path(find_model(str(path), None, None))
    for pattern in _TOKENIZER_FILES:
        for file in served.glob(pattern):
            shutil.copy(file, partial)
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
