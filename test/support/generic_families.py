"""The families that are served with transformers' code, as tiny seeded checkpoints.

The one list of families: a model of each is compared with transformers' `generate`. Weights are
random in fp32, with a wider spread than a trained model's, so that greedy tokens vary.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from sgl_pipeline.pp_runner.model.generic import generic_stage

VOCAB_SIZE, NUM_LAYERS = 128, 4
MODEL_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_GROUPED: dict[str, Any] = {
    **_EXPERTS,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
WINDOWED = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + pair / 8 for pair in range(6)],
    "long_factor": [2.0 + pair for pair in range(6)],
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "out_hidden_size": 48,
    "intermediate_size": 32,
    "depth": 1,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


@dataclass(frozen=True)
class GenericFamily:
    """A family by transformers' `model_type`, and how its tiny model differs from the others.

    `published` is a model of it that people run, `around` the type of the multimodal model that
    its checkpoints hold it in, if any.
    """

    model_type: str
    published: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    around: str | None = None


# Those that the issue of models names come first.
GENERIC_FAMILIES: dict[str, GenericFamily] = {
    "llama": GenericFamily("llama", "Llama 3.1 8B"),
    "qwen2": GenericFamily("qwen2", "Qwen2.5 7B", {"tie_word_embeddings": True}),
    "qwen3": GenericFamily("qwen3", "Qwen3 8B", {"head_dim": 24}),
    "qwen3-vl": GenericFamily(
        "qwen3_vl_text",
        "Qwen3-VL 8B, its text",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            }
        },
        around="qwen3_vl",
    ),
    "gemma2": GenericFamily(
        "gemma2",
        "Gemma 2 9B",
        {"sliding_window": 8, "layer_types": WINDOWED, "query_pre_attn_scalar": 20},
    ),
    "gemma3": GenericFamily(
        "gemma3_text",
        "Gemma 3 12B",
        {"sliding_window": 8, "layer_types": WINDOWED, "query_pre_attn_scalar": 20},
    ),
    "gemma4": GenericFamily(
        "gemma4_text",
        "Gemma 4 26B-A4B",
        {
            **_EXPERTS,
            "num_experts": 4,
            "top_k_experts": 2,
            "enable_moe_block": True,
            "sliding_window": 8,
            "layer_types": WINDOWED,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gpt-oss": GenericFamily(
        "gpt_oss",
        "gpt-oss-20b",
        {**_EXPERTS, "sliding_window": 8, "layer_types": WINDOWED},
    ),
    "glm4-moe": GenericFamily("glm4_moe", "GLM-4.5-Air", {**_GROUPED, "use_qk_norm": True}),
    "minimax-m2": GenericFamily("minimax_m2", "MiniMax-M2", _EXPERTS),
    "phi3": GenericFamily("phi3", "Phi-4, Phi-4-mini", {"head_dim": None, "hidden_size": 64}),
    "phi4-mini": GenericFamily(
        "phi3",
        "Phi-4, Phi-4-mini",
        {
            "head_dim": None,
            "hidden_size": 64,
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 128,
        },
    ),
    "ministral3": GenericFamily(
        "ministral3",
        "Ministral 3 8B",
        {
            "rope_parameters": {
                **_YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "ministral": GenericFamily(
        "ministral", "Ministral 8B", {"sliding_window": 8, "layer_types": WINDOWED}
    ),
    "deepseek-v3": GenericFamily(
        "deepseek_v3",
        "DeepSeek-V3",
        {**_GROUPED, **_MLA, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "olmo3": GenericFamily(
        "olmo3",
        "OLMo 3 7B",
        {"sliding_window": 8, "layer_types": WINDOWED, "head_dim": None, "hidden_size": 64},
    ),
    "smollm3": GenericFamily("smollm3", "SmolLM3 3B", {"no_rope_layers": [1, 0, 1, 0]}),
    "granite": GenericFamily(
        "granite",
        "Granite 3.3 8B",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
        },
    ),
    "mixtral": GenericFamily("mixtral", "Mixtral 8x7B", _EXPERTS),
    "mistral": GenericFamily("mistral", "Mistral 7B", {"sliding_window": 8}),
    "gemma": GenericFamily("gemma", "Gemma 7B"),
    "qwen2-moe": GenericFamily(
        "qwen2_moe", "Qwen1.5-MoE-A2.7B", {**_EXPERTS, "shared_expert_intermediate_size": 40}
    ),
    "qwen3-moe": GenericFamily("qwen3_moe", "Qwen3-30B-A3B", _EXPERTS),
    "glm4-moe-lite": GenericFamily("glm4_moe_lite", "GLM-4.7-Flash", {**_GROUPED, **_MLA}),
    "olmo2": GenericFamily("olmo2", "OLMo 2 7B", {"head_dim": None}),
    "olmoe": GenericFamily("olmoe", "OLMoE 1B-7B", {**_EXPERTS, "head_dim": None}),
    "cohere2": GenericFamily(
        "cohere2", "Command R7B", {"sliding_window": 8, "layer_types": WINDOWED}
    ),
    "ernie4-5-moe": GenericFamily(
        "ernie4_5_moe",
        "ERNIE 4.5 21B-A3B",
        {**_EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    ),
    "exaone4": GenericFamily(
        "exaone4", "EXAONE 4.0 32B", {"sliding_window": 8, "layer_types": WINDOWED}
    ),
    "seed-oss": GenericFamily("seed_oss", "Seed-OSS 36B"),
    "mimo-v2-flash": GenericFamily(
        "mimo_v2_flash",
        "MiMo-V2-Flash",
        {
            **_GROUPED,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 8,
            "layer_types": WINDOWED,
        },
    ),
    "hy-v3": GenericFamily("hy_v3", "Hy3", _GROUPED),
    "granite-moe": GenericFamily("granitemoe", "Granite 3.1 3B-A800M", _EXPERTS),
    "starcoder2": GenericFamily("starcoder2", "StarCoder2 7B"),
    "laguna": GenericFamily("laguna", "Laguna", _GROUPED),
    "apertus": GenericFamily("apertus", "Apertus 8B"),
    "hunyuan": GenericFamily("hunyuan_v1_dense", "Hunyuan 7B"),
}


@cache
def _session_directory() -> tempfile.TemporaryDirectory[str]:
    """Removed when the interpreter ends."""
    return tempfile.TemporaryDirectory(prefix="sgl_pipeline_generic_families_")


@cache
def generic_model(name: str) -> Path:
    """The directory of the checkpoint of the family `name`; written once per test session."""
    family = GENERIC_FAMILIES[name]
    return write_model(name, family.model_type, family.changes, family.around)


def write_model(
    name: str, model_type: str, changes: Mapping[str, Any], around: str | None = None
) -> Path:
    """A checkpoint of `model_type` under a new name. Biases, norm weights, sinks and scalars are
    random too, where transformers starts them with 0 and 1."""
    directory = Path(_session_directory().name) / name
    torch.manual_seed(sum(name.encode()))
    sizes = {key: value for key, value in {**MODEL_SIZES, **changes}.items() if value is not None}
    auto = AutoModelForCausalLM
    if around is None:
        config = AutoConfig.for_model(model_type, **sizes)
    else:
        auto = AutoModelForImageTextToText
        config = AutoConfig.for_model(around, text_config=sizes, vision_config=_VISION)
    model = auto.from_config(config, dtype=torch.float32).eval()
    _spread(model)
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def _spread(model: PreTrainedModel) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in model.state_dict():
            continue
        if "norm" in name and name.endswith("weight"):
            tensor.uniform_(0.5, 1.5)
        elif "layer_scalar" in name or "scale" in name:
            tensor.uniform_(0.8, 1.2)
        elif tensor.dim() < 2 or name.endswith("bias") or "experts" in name:
            tensor.normal_(0.0, 0.2)


_structure = cache(generic_stage.structure)


def trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages of a checkpoint share one trace of its structure: each process makes its own on a
    server, and they are equal, as the code and the config are the same."""
    monkeypatch.setattr(generic_stage, "structure", _structure)


@cache
def _reference(directory: Path) -> PreTrainedModel:
    # The others leave out softcaps.
    has_tower = hasattr(AutoConfig.from_pretrained(directory), "vision_config")
    kind = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
    return kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def generated(directory: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens of transformers' greedy `generate`."""
    output = _reference(directory).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def reference_logits(directory: Path, prompt: list[int], output: list[int]) -> torch.Tensor:
    """transformers' logits [N + 1, V] after `prompt` and after each of the N tokens `output`."""
    logits = _reference(directory)(torch.tensor([prompt + output])).logits
    return logits[0, len(prompt) - 1 :]
