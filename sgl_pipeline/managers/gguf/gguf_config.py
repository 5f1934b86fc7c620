"""The config.json that a GGUF file's metadata stand for.

The names of fields are those of transformers' table, completed where it passes over some. As in
`model_spec.py`, metadata that may change what the model computes are honored or refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf import GGMLQuantizationType

from sgl_pipeline.errors import CheckpointError, UnsupportedModelError
from sgl_pipeline.managers.gguf.gguf_file import GgufFile


@dataclass(frozen=True, slots=True)
class Architecture:
    """Hugging Face's names of an architecture of GGUF; `pairs_heads` where llama.cpp's converter
    reorders the rows of queries and keys."""

    model_type: str
    name: str
    pairs_heads: bool = False


_LLAMA = Architecture("llama", "LlamaForCausalLM", pairs_heads=True)
_MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", pairs_heads=True)
_ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM"),
}
# Fields beside those of transformers' table. All lengths of a head are one here.
_MORE_FIELDS = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_ROPE_FIELDS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
}
# They say how the file was made, or what its length in training was.
_NO_MATHS = ("tensor_data_layout", "rope.scaling.finetuned", "attention.causal")
# What llama.cpp's converter writes factors of frequencies for (Llama 3.1 to 3.3).
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_LENGTH = 1.0, 4.0, 8192


def architecture_of(file: GgufFile) -> Architecture:
    """Raises UnsupportedModelError for one that is not known."""
    found = _ARCHITECTURES.get(file.architecture)
    if found is None:
        raise UnsupportedModelError(
            f"{file.path} is of the architecture {file.architecture!r}; known in GGUF are "
            f"{', '.join(_ARCHITECTURES)}; serve others from safetensors"
        )
    return _MIXTRAL if found is _LLAMA and file.metadata.get("llama.expert_count") else found


def config_of(file: GgufFile) -> dict[str, Any]:
    """The content of config.json.

    Raises UnsupportedModelError for metadata that are not known, CheckpointError where the file
    has no table of embeddings, or fewer tensors than layers.
    """
    architecture = architecture_of(file)
    fields = _Fields(file)
    fields.put("vocab_size", _num_embeddings(file), "the table of embeddings")
    names = _field_names(architecture)
    rope: dict[str, Any] = {}
    prefix = f"{file.architecture}."
    for key, value in file.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in _NO_MATHS or value is None:
            continue
        if name in names:
            fields.put(names[name], value, key)
        elif name in _ROPE_FIELDS and isinstance(value, str | float | int):
            rope[_ROPE_FIELDS[name]] = value
        elif value:
            raise UnsupportedModelError(
                f"{file.path} sets {key} = {value!r}, which may change what the model computes and "
                "is not known; serve the model from safetensors"
            )
    # Before anything counts the layers one by one.
    if fields.values.get("num_hidden_layers", 0) > len(file.tensors):
        raise CheckpointError(
            f"{file.path} says {file.architecture}.block_count = "
            f"{fields.values['num_hidden_layers']}, and holds {len(file.tensors)} tensors"
        )
    return fields.values | {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_biases(file, architecture),
        "norm_topk_prob": architecture.model_type in ("qwen3_moe", "mixtral"),
        "rope_scaling": _rope_scaling(file, rope, fields.values),
        "dtype": _dtype(file),
        **_token_ids(file.metadata),
    }


def _field_names(architecture: Architecture) -> dict[str, str]:
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    is_mixtral = architecture is _MIXTRAL
    table = GGUF_CONFIG_MAPPING["llama" if is_mixtral else architecture.model_type]
    names = {key: name for key, name in table.items() if name is not None} | _MORE_FIELDS
    return names | ({"expert_count": "num_local_experts"} if is_mixtral else {})


class _Fields:
    """Fields of the config; several metadata may speak of one, and must agree."""

    def __init__(self, file: GgufFile) -> None:
        self.values: dict[str, Any] = {}
        self._file = file

    def put(self, name: str, value: Any, source: str) -> None:
        """Raises UnsupportedModelError where it is not one number, such as one for each layer, or
        another source gave another one."""
        if not isinstance(value, int | float):
            raise UnsupportedModelError(
                f"{self._file.path}: {source} is {value!r}, not one number; serve the model from "
                "safetensors"
            )
        if self.values.setdefault(name, value) != value:
            raise UnsupportedModelError(
                f"{self._file.path}: {source} says {value!r} for {name}, and elsewhere it is "
                f"{self.values[name]!r}; serve the model from safetensors"
            )


def _num_embeddings(file: GgufFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise CheckpointError(f"{file.path} holds no tensor token_embd.weight")
    return table.shape[0]


def _biases(file: GgufFile, architecture: Architecture) -> dict[str, bool]:
    """The switches of biases, which metadata do not have; Qwen2 always has the same."""
    switches = {
        "llama": {"attention_bias": "attn_output", "mlp_bias": "ffn_down"},
        "qwen3": {"attention_bias": "attn_output"},
        "qwen2_moe": {"qkv_bias": "attn_q"},
        "qwen3_moe": {"attention_bias": "attn_output"},
    }.get(architecture.model_type, {})
    return {name: f"blk.0.{tensor}.bias" in file.tensors for name, tensor in switches.items()}


def _dtype(file: GgufFile) -> str:
    """The dtype that CPUs compute fast, or fp32 if all tensors are stored in it."""
    types = {tensor.ggml_type for tensor in file.tensors.values()}
    return "float32" if types == {GGMLQuantizationType.F32} else "bfloat16"


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Any of the ends may end an answer: that of a text, of a turn, and of a message."""

    def ids(*kinds: str) -> list[int]:
        found = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in kinds]
        return list(dict.fromkeys(one for one in found if isinstance(one, int)))

    one = {"bos_token_id": ids("bos"), "pad_token_id": ids("padding")}
    return {name: found[0] if found else None for name, found in one.items()} | {
        "eos_token_id": ids("eos", "eot", "eom") or None
    }


def _rope_scaling(
    file: GgufFile, rope: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any] | None:
    """`rope_scaling` of config.json from metadata, or from factors of frequencies.

    Raises UnsupportedModelError for factors that no rule of Llama 3 gives.
    """
    if file.rope_factors is None:
        return None if rope.get("rope_type", "none") == "none" else dict(rope)
    factor = max(file.rope_factors)
    theta = float(fields.get("rope_theta", 10_000.0))
    expected = _llama3_factors(factor, theta, 2 * len(file.rope_factors))
    fits = all(
        math.isclose(found, wanted, rel_tol=1e-4)
        for found, wanted in zip(file.rope_factors, expected, strict=True)
    )
    if rope or not fits:
        raise UnsupportedModelError(
            f"{file.path}: the tensor rope_freqs.weight scales the rotary embedding otherwise than "
            "Llama 3.1 does; serve the model from safetensors"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_LENGTH,
    }


def _llama3_factors(factor: float, theta: float, head_dim: int) -> list[float]:
    """The divisor of each frequency (transformers' `_compute_llama3_parameters`)."""
    factors = []
    for dim in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (dim / head_dim)
        turns = _LLAMA3_LENGTH / wavelength
        share = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
        share = min(1.0, max(0.0, share))
        factors.append(1 / ((1 - share) / factor + share))
    return factors
