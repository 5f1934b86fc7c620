"""Rounds a 16-bit checkpoint to a published quantized format, each weight to the nearest number.

    python -m benchmark.models.quantize_model build/models/0.27b TARGET --format pack-quantized

Run by hand or by the benchmarks, which need checkpoints of every format. Calibrated methods (GPTQ,
AWQ) lose less: never quote this for what a format of 4 bits can do. Tensors are rounded one after
the other, but all of the result is in memory at once.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmark.support.command import Command, Options
from sgl_pipeline.args import require
from sgl_pipeline.pp_runner.weights.rounding import to_fp8, to_int4, to_int8

FORMATS = ("int-quantized", "float-quantized", "pack-quantized")
GROUP_SIZE = 128
Tensors = dict[str, torch.Tensor]


def quantize_model(source: Path, target: Path, format_name: str, group_size: int) -> None:
    """Writes `source` in the compressed-tensors format into the new directory `target`; embedding,
    norms and head stay as they are."""
    tensors: Tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if name.endswith("_proj.weight"):
                tensors |= quantized(name, tensor, format_name, group_size)
            else:
                tensors[name] = tensor
    target.mkdir(parents=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for path in source.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copy(path, target)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(format_name, group_size)
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def quantized(name: str, matrix: torch.Tensor, format_name: str, group_size: int) -> Tensors:
    """The tensors of one matrix, by name."""
    if format_name == "int-quantized":
        int8 = to_int8(matrix)
        return {name: int8.values, f"{name}_scale": int8.scales[:, None]}
    if format_name == "float-quantized":
        fp8 = to_fp8(matrix, matrix.shape[1])
        return {name: fp8.values, f"{name}_scale": fp8.scales}
    int4 = to_int4(matrix, group_size)
    return {
        # Eight neighbors in a word, the first lowest: as halves of bytes lie in memory.
        f"{name}_packed": int4.packed.view(torch.int32),
        f"{name}_scale": int4.scales.bfloat16(),
        f"{name}_shape": torch.tensor(matrix.shape),
    }


def quantization_config(format_name: str, group_size: int) -> dict[str, Any]:
    """The `quantization_config` of such a checkpoint."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
    rows: dict[str, Any] | None = {"num_bits": 8, "strategy": "token", "dynamic": True}
    if format_name == "float-quantized":
        weights["type"] = "float"
    if format_name == "pack-quantized":
        weights = {**weights, "num_bits": 4, "strategy": "group", "group_size": group_size}
        rows = None
    if rows is not None:
        rows |= {"type": weights["type"], "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**weights, "symmetric": True, "dynamic": False},
        "input_activations": rows,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, saves=False)
    command.add("source", type=Path, help="directory of a 16-bit checkpoint")
    command.add("target", type=Path, help="directory to write, which must not exist")
    command.add("--format", choices=FORMATS, required=True)
    command.add("--group-size", type=int, default=GROUP_SIZE, help="of 4 bits")
    return command.run(_write, argv)


def _write(options: Options) -> None:
    require(not options.target.exists(), f"{options.target} exists already")
    require((options.source / "config.json").exists(), f"{options.source} holds no config.json")
    quantize_model(options.source, options.target, options.format, options.group_size)


if __name__ == "__main__":
    sys.exit(main())
