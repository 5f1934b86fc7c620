"""Tiny checkpoints in every published quantized layout, beside the weights that they stand for.

Packed here by the layouts' definitions, one number at a time, and not by the code under test;
`pack-quantized` by the package compressed-tensors itself.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny_model

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, torch.Tensor]


class Stored(NamedTuple):
    """One matrix: its tensors by the ends of their names, and what they stand for, fp32."""

    tensors: Tensors
    dequantized: torch.Tensor


def pack(numbers: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """[R, C / 8] int32 of [R, C]: in each word the bits 4 k have the number `order[k]`."""
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
    for k, place in enumerate(order):
        words += numbers[:, place::8].long() << 4 * k
    return words.where(words < 2**31, words - 2**32).int()


class Numbers(NamedTuple):
    """4-bit numbers near a matrix [O, I], and what they mean."""

    numbers: torch.Tensor  # [O, I], 0 to 15
    scales: torch.Tensor  # [O, G] fp16
    zeros: torch.Tensor  # [O, G], 0 to 15
    groups: torch.Tensor  # [I]

    @property
    def dequantized(self) -> torch.Tensor:
        scales, zeros = self.scales.float(), self.zeros.float()
        return (self.numbers.float() - zeros[:, self.groups]) * scales[:, self.groups]


def four_bits(matrix: torch.Tensor, *, symmetric: bool, ordered: bool = False) -> Numbers:
    """Some zero points, and with `ordered` inputs in an order of their own."""
    outputs, inputs = matrix.shape
    groups = torch.arange(inputs) // GROUP
    generator = torch.Generator().manual_seed(inputs)
    if ordered:
        groups = groups[torch.randperm(inputs, generator=generator)]
    num_groups = inputs // GROUP
    by_group = torch.stack([matrix[:, groups == g].abs().amax(dim=1) for g in range(num_groups)], 1)
    scales = (by_group / 7).half()
    zeros = torch.full((outputs, num_groups), 8)
    if not symmetric:
        zeros = torch.randint(5, 12, (outputs, num_groups), generator=generator)
    numbers = (matrix / scales.float()[:, groups]).round() + zeros[:, groups]
    return Numbers(numbers.clamp(0, 15).long(), scales, zeros, groups)


def packed_int4(matrix: torch.Tensor, symmetric: bool = True, ordered: bool = False) -> Stored:
    own = four_bits(matrix, symmetric=symmetric, ordered=ordered)
    tensors = {
        "weight_packed": pack_to_int32((own.numbers - 8).to(torch.int8), 4),
        "weight_scale": own.scales,
        "weight_shape": torch.tensor(matrix.shape),
    }
    if not symmetric:
        zeros = (own.zeros - 8).to(torch.int8)
        tensors["weight_zero_point"] = pack_to_int32(zeros, 4, packed_dim=0)
    if ordered:
        tensors["weight_g_idx"] = own.groups.int()
    return Stored(tensors, own.dequantized)


def gptq(matrix: torch.Tensor, version: int = 1, ordered: bool = False) -> Stored:
    own = four_bits(matrix, symmetric=False, ordered=ordered)
    return Stored(
        {
            "qweight": pack(own.numbers).T,
            "qzeros": pack((own.zeros - int(version == 1)).T),
            "scales": own.scales.T,
            "g_idx": own.groups.int(),
        },
        own.dequantized,
    )


def awq(matrix: torch.Tensor) -> Stored:
    own = four_bits(matrix, symmetric=False)
    tensors = {
        "qweight": pack(own.numbers.T, AWQ_ORDER),
        "qzeros": pack(own.zeros.T, AWQ_ORDER),
        "scales": own.scales.T,
    }
    return Stored(tensors, own.dequantized)


def int8(matrix: torch.Tensor) -> Stored:
    scales = (matrix.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
    values = (matrix / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return Stored({"weight": values, "weight_scale": scales}, values.float() * scales.float())


def fp8(matrix: torch.Tensor, block: tuple[int, int], scale_name: str = "weight_scale") -> Stored:
    """With a scale for each block of outputs and inputs; a single one has no dimensions."""
    rows, columns = (
        torch.arange(size) // step for size, step in zip(matrix.shape, block, strict=True)
    )
    scales = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for row, column in torch.cartesian_prod(rows.unique(), columns.unique()).tolist():
        part = matrix[rows == row][:, columns == column]
        scales[row, column] = part.abs().amax() / 448
    spread = scales[rows][:, columns]
    values = (matrix / spread).to(torch.float8_e4m3fn)
    stored = scales if scales.numel() > 1 else scales[0, 0].clone()
    return Stored({"weight": values, scale_name: stored}, values.float() * spread)


INT8_WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8_WEIGHTS = INT8_WEIGHTS | {"type": "float"}
INT8_ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FP8_ROWS = INT8_ROWS | {"type": "float"}

# Of keys and values, with their scales in the checkpoint, as llm-compressor writes it.
KV_CACHE_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
    "group_size": None,
    "block_structure": None,
    "actorder": None,
    "observer": "minmax",
    "observer_kwargs": {},
}


def compressed(
    weights: dict[str, Any], rows: dict[str, Any] | None, file_format: str
) -> dict[str, Any]:
    """A `quantization_config` as llm-compressor writes it."""
    empty = {"group_size": None, "block_structure": None, "actorder": None, "dynamic": False}
    made = {"observer": "minmax", "observer_kwargs": {}}
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, **empty, **made, **weights},
        "input_activations": rows and {**made, "observer": None, **rows},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": file_format,
        "ignore": ["lm_head", "re:.*layers[.]1[.].*down_proj"],
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.4,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.18.0",
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "desc_act": False,
    "sym": False,
    "damp_percent": 0.01,
    "true_sequential": True,
    "lm_head": False,
}


class Format(NamedTuple):
    config: dict[str, Any]
    store: Callable[[torch.Tensor], Stored]
    rounds_rows: bool = False


def _fp8_blocks(matrix: torch.Tensor) -> Stored:
    return fp8(matrix, (128, 128), "weight_scale_inv")


FORMATS: dict[str, Format] = {
    "int-quantized": Format(compressed(INT8_WEIGHTS, INT8_ROWS, "int-quantized"), int8, True),
    "float-quantized": Format(
        compressed(FP8_WEIGHTS, FP8_ROWS, "float-quantized"),
        lambda matrix: fp8(matrix, (1, matrix.shape[1])),
        True,
    ),
    "pack-quantized": Format(compressed(INT4, None, "pack-quantized"), packed_int4),
    "pack-quantized asymmetric, ordered": Format(
        compressed(INT4 | {"symmetric": False, "actorder": "group"}, None, "pack-quantized"),
        lambda matrix: packed_int4(matrix, symmetric=False, ordered=True),
    ),
    "fp8": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        lambda matrix: fp8(matrix, tuple(matrix.shape)),
        True,
    ),
    "fp8 blocks": Format(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.2.mlp"],
        },
        _fp8_blocks,
        True,
    ),
    "gptq": Format(GPTQ, gptq),
    "gptq v2, ordered": Format(
        GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"},
        lambda matrix: gptq(matrix, version=2, ordered=True),
    ),
    # As Qwen publishes Qwen3.5: the lone name says that nothing of it differs.
    "gptq without attention": Format(
        GPTQ | {"dynamic": {"lm_head": {}, "-:.*attn.*": {}, "-:.*visual.*": {}}}, gptq
    ),
    "awq": Format(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["layers.0.self_attn"],
        },
        awq,
    ),
}


def is_quantized(name: str, config: dict[str, Any]) -> bool:
    """Of the models here, by the lists above."""
    is_product = name.endswith("_proj.weight") or ".linear_attn.in_proj_" in name
    if config["quant_method"] == "compressed-tensors":
        return is_product and not ("layers.1." in name and "down_proj" in name)
    if "dynamic" in config:
        return is_product and "attn" not in name
    kept = config.get("modules_to_not_convert", ())
    return is_product and not any(f"{entry}." in name for entry in kept)


class QuantizedModel(NamedTuple):
    """`path` is the checkpoint, `dequantized` one of plain fp32 with the same weights."""

    path: Path
    dequantized: Path


@cache
def _session_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="sgl_pipeline_quantized_")


def quantized_model(format_name: str, model: str = "qwen3") -> QuantizedModel:
    """The tiny model `model` in one of FORMATS; written once per test session."""
    return _write_model(format_name, model)


@cache
def _write_model(format_name: str, model: str) -> QuantizedModel:
    own, plain = FORMATS[format_name], tiny_model(model)
    directory = Path(_session_directory().name) / f"{format_name} {model}".replace(" ", "_")
    stored: Tensors = {}
    dequantized: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not is_quantized(name, own.config):
            stored[name] = dequantized[name] = tensor
            continue
        tensors, dequantized[name] = own.store(tensor)
        module = name.removesuffix("weight")
        stored |= {module + end: part.contiguous() for end, part in tensors.items()}
    paths = QuantizedModel(directory / "quantized", directory / "dequantized")
    for path, contents in zip(paths, (stored, dequantized), strict=True):
        shutil.copytree(plain, path)
        save_file(contents, path / "model.safetensors", metadata={"format": "pt"})
    write_config(paths.path, own.config)
    return paths


def write_config(model: Path, quantization: dict[str, Any]) -> None:
    """Puts `quantization` into the config.json of the directory `model`."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
