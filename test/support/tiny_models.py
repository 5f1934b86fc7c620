"""Tiny seeded Hugging Face checkpoints of every supported family, written by transformers.

Used by the model tests and the server tests. Random weights in fp32, with wider spread than a
trained model's, so that greedy tokens vary from step to step.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 320
NUM_LAYERS = 6

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that tests of some 50 tokens reach every branch of the rule.
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE: dict[str, Any] = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

# name: (model class, config class, what differs from _SIZES, bytes of a shard or None)
_VARIANTS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any], int | None]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}, None),
    "llama3-rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LLAMA3_ROPE}, None),
    "llama-biases-linear-rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LINEAR_ROPE},
        None,
    ),
    "mistral-sharded": (MistralForCausalLM, MistralConfig, {"sliding_window": None}, 200_000),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}, None),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}, None),
    "qwen3-tied-sharded": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}, 200_000),
}
TINY_MODELS = tuple(_VARIANTS)


@cache
def _session_directory() -> tempfile.TemporaryDirectory[str]:
    """Removed when the interpreter ends."""
    return tempfile.TemporaryDirectory(prefix="sgl_pipeline_tiny_models_")


@cache
def tiny_model(name: str) -> Path:
    """The directory of a checkpoint from TINY_MODELS; written once per test session.

    Biases and norm weights are random too: transformers starts them at 0 and 1, where a decoder
    that forgets them would pass.
    """
    model_class, config_class, changes, shard_bytes = _VARIANTS[name]
    directory = Path(_session_directory().name) / name
    torch.manual_seed(TINY_MODELS.index(name))
    model = model_class(config_class(**{**_SIZES, **changes}))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory, max_shard_size=shard_bytes or "5GB")
    return directory
