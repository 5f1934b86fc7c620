"""A tiny gpt-oss with MXFP4 experts in the published layout, beside the weights that they stand
for, by transformers' own conversion."""

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny_model
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


class Mxfp4Model(NamedTuple):
    """The directories of the model and of the one in fp32 that it stands for."""

    path: Path
    dequantized: Path


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    """Removed when the interpreter ends."""
    return tempfile.TemporaryDirectory(prefix="sgl_pipeline_mxfp4_")


@cache
def mxfp4_model() -> Mxfp4Model:
    """Written once per test session: any codes, with scales near those of the plain model."""
    made = Mxfp4Model(*(Path(_directory().name) / name for name in ("packed", "dequantized")))
    plain = tiny_model("gpt-oss")
    packed = load_file(plain / "model.safetensors")
    dequantized = dict(packed)
    generator = torch.Generator().manual_seed(3)
    for name in [one for one in packed if one.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, inputs, outputs = packed.pop(name).shape
        shape = (num_experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        blocks[0, 0, 0], scales[0, 0, 0] = 0x80, 0  # zeros alone: any scale will do
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        dequantized[name] = meant.contiguous()
    for path, tensors in zip(made, (packed, dequantized), strict=True):
        shutil.copytree(plain, path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (made.path / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return made
