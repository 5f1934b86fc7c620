"""GGUF files of tiny checkpoints, as llama.cpp's converter would write them."""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

# By model_type: the architecture in GGUF.
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
_SIZES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def write_gguf(
    source: Path,
    target: Path,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes the checkpoint `source` into the file `target`, with matrices of the type `kind`.

    Args:
        metadata: added, and in place of others; None for a value leaves a key out.
        tensors: added in fp32, and in place of others, by GGUF's names.
    """
    config = json.loads((source / "config.json").read_text())
    name = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(target, name)
    for key, value in (_metadata(config, name) | (metadata or {})).items():
        _add(writer, key, value)
    found = {one: (tensor, kind) for one, tensor in _tensors(source, config, name).items()}
    found |= {one: (tensor, "F32") for one, tensor in (tensors or {}).items()}
    for one, (tensor, own_kind) in found.items():
        own_type = _type_of(tensor.shape, own_kind)
        writer.add_tensor(one, gguf.quantize(tensor, own_type), raw_dtype=own_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def rounded_checkpoint(source: Path, target: Path, kind: str) -> Path:
    """The checkpoint `source` in fp32, with the numbers that its GGUF file of `kind` holds."""
    target.mkdir()
    rounded = {}
    for path in source.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            rounded[name] = _round(tensor, _type_of(tensor.shape, kind))
    save_file(rounded, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    if config["model_type"] == "qwen3_moe":
        config["norm_topk_prob"] = True  # what llama.cpp computes for all files of this family
    (target / "config.json").write_text(json.dumps(config))
    return target


def _type_of(shape: Sequence[int], kind: str) -> GGMLQuantizationType:
    """Vectors stay fp32; rows that are no whole blocks get 16 bits."""
    if len(shape) < 2:
        return GGMLQuantizationType.F32
    found = GGMLQuantizationType[kind]
    return GGMLQuantizationType.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[found][0] else found


def _round(tensor: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind).copy())


def _metadata(config: dict[str, Any], name: str) -> dict[str, Any]:
    rope = config["rope_parameters"]
    sizes = {f"{name}.{key}": config[field] for field, key in _SIZES.items() if field in config}
    return sizes | {
        f"{name}.rope.freq_base": float(rope["rope_theta"]),
        f"{name}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{name}.rope.scaling.type": "linear" if rope["rope_type"] == "linear" else None,
        f"{name}.rope.scaling.factor": rope.get("factor"),
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    add = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}
    add.get(type(value), writer.add_uint32)(key, value)


def _tensors(source: Path, config: dict[str, Any], name: str) -> dict[str, np.ndarray]:
    arch = next(one for one, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    experts: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    found = {}
    for path in sorted(source.glob("*.safetensors")):
        for own_name, tensor in load_file(path).items():
            expert = _EXPERT.search(own_name)
            of_file = names.get_name(_EXPERT.sub(".experts.", own_name), (".weight", ".bias"))
            assert of_file is not None, own_name
            if expert is not None:
                experts[of_file][int(expert[1])] = tensor.numpy()
            else:
                found[of_file] = _reordered(of_file, tensor.numpy(), config, name)
    for of_file, parts in experts.items():
        found[of_file] = np.stack([parts[number] for number in sorted(parts)])
    return found


def _reordered(of_file: str, tensor: np.ndarray, config: dict[str, Any], name: str) -> np.ndarray:
    """Rows of two halves become pairs of neighbors (`permute` in llama.cpp's converter)."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    field = heads.get(of_file.split(".")[-2])
    if name != "llama" or field is None:
        return tensor
    halves = tensor.reshape(config[field], 2, -1, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
