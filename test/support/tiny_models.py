"""Tiny seeded Hugging Face checkpoints of every supported family, written by transformers.

Used by the model tests and the server tests. Random weights in fp32, with wider spread than a
trained model's, so that greedy tokens vary from step to step.
"""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
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
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
_SHARED_EXPERT: dict[str, Any] = {**_EXPERTS, "shared_expert_intermediate_size": 80}

# Two of three layers have a state, with two value heads for each key head. Heads of 32, so that a
# quarter of them, which is rotated, has several pairs.
_STATES: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}

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
    "mixtral-sharded": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}, 200_000),
    "qwen2-moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, _SHARED_EXPERT, None),
    "qwen2-moe-every-other-layer": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {**_SHARED_EXPERT, "decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False},
        None,
    ),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        # Experts of whole groups of 32, as formats of 4 bits want them.
        {
            **_EXPERTS,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "mlp_only_layers": [0, 4],
        },
        None,
    ),
    "qwen3-moe-tied": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**_EXPERTS, "tie_word_embeddings": True},
        None,
    ),
    "glm": (GlmForCausalLM, GlmConfig, {}, None),
    # The base that ChatGLM's rope_ratio 50 gives.
    "glm-stretched-rope": (
        GlmForCausalLM,
        GlmConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        None,
    ),
    "glm4": (Glm4ForCausalLM, Glm4Config, {"attention_bias": False}, None),
    "glm4-tied-other-rope": (
        Glm4ForCausalLM,
        Glm4Config,
        {
            "tie_word_embeddings": True,
            "rope_parameters": {**_LINEAR_ROPE, "partial_rotary_factor": 0.25},
        },
        None,
    ),
    # Windows shorter than the tests' prompts: of all layers, of later ones, of even ones, of some.
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 12}, None),
    "mixtral-window": (
        MixtralForCausalLM,
        MixtralConfig,
        {"num_local_experts": 4, "sliding_window": 5},
        None,
    ),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
        None,
    ),
    "qwen2-moe-window": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {
            **_SHARED_EXPERT,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 4,
        },
        None,
    ),
    "qwen3-layer-types": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"] * 2,
        },
        None,
    ),
    "qwen3-moe-window": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**_EXPERTS, "use_sliding_window": True, "sliding_window": 11},
        None,
    ),
    # Hidden and inner sizes of whole groups of 32, as MXFP4 wants them.
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 10,
            # Reached by some gates and ups of random weights.
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "truncate": False,
            },
        },
        None,
    ),
}
# Those whose layers have states.
_HYBRIDS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any], int | None]] = {
    "qwen3.5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, _STATES, None),
    "qwen3.5-tied-biases": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        {**_STATES, "tie_word_embeddings": True, "attention_bias": True},
        None,
    ),
    "qwen3.5-moe": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        {**_STATES, **_SHARED_EXPERT},
        None,
    ),
    "qwen3-next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {**_STATES, **_SHARED_EXPERT, "mlp_only_layers": [1]},
        None,
    ),
    "qwen3.5-multimodal": (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config,
        {"text_config": {**_SIZES, **_STATES}, "vision_config": _VISION},
        None,
    ),
    "qwen3.5-moe-multimodal": (
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeConfig,
        {"text_config": {**_SIZES, **_STATES, **_SHARED_EXPERT}, "vision_config": _VISION},
        None,
    ),
}
# Sizes of whole groups of 32, and heads that fill words of eight, as formats of 4 bits want them.
_GROUPED_STATES: dict[str, Any] = {
    **_STATES,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
_GROUPED_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
_GROUPED_HYBRIDS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any], int | None]] = {
    "qwen3.5-grouped": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, _GROUPED_STATES, None),
    "qwen3.5-moe-grouped": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        {**_GROUPED_STATES, **_GROUPED_EXPERTS},
        None,
    ),
    "qwen3-next-grouped": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {**_GROUPED_STATES, **_GROUPED_EXPERTS},
        None,
    ),
}
HYBRID_MODELS = (*_HYBRIDS,)
GROUPED_HYBRIDS = (*_GROUPED_HYBRIDS,)
TINY_MODELS = (*_VARIANTS, "chatglm")

# By rope type; the original contexts are shorter than the tests' prompts.
_YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONG_CONTEXT: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any], int | None]] = {
    "qwen2-yarn": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"rope_parameters": _YARN_ROPE, "max_position_embeddings": 32},
        None,
    ),
    "qwen3-yarn-mscale": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "rope_parameters": {
                **_YARN_ROPE,
                "beta_fast": 8.0,
                "beta_slow": 0.5,
                "truncate": False,
                "mscale": 2.0,
                "mscale_all_dim": 0.5,
            },
            "max_position_embeddings": 128,
        },
        None,
    ),
    "glm4-yarn": (
        Glm4ForCausalLM,
        Glm4Config,
        {
            "rope_parameters": {**_YARN_ROPE, "partial_rotary_factor": 0.5},
            "max_position_embeddings": 128,
        },
        None,
    ),
    "llama-dynamic": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
            "max_position_embeddings": 64,
        },
        None,
    ),
    "llama-longrope": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5],
                "long_factor": [1.0, 1.1, 1.4, 1.9, 2.6, 3.5, 4.2, 5.0],
            },
            "max_position_embeddings": 256,
        },
        None,
    ),
}


@cache
def _session_directory() -> tempfile.TemporaryDirectory[str]:
    """Removed when the interpreter ends."""
    return tempfile.TemporaryDirectory(prefix="sgl_pipeline_tiny_models_")


@cache
def tiny_model(name: str) -> Path:
    """The directory of a checkpoint from TINY_MODELS, HYBRID_MODELS or GROUPED_HYBRIDS, or of one
    with a stretched context; written once per test session.

    Biases and norm weights are random too: transformers starts them at 0 and 1, where a decoder
    that forgets them would pass.
    """
    directory = Path(_session_directory().name) / name
    if name == "chatglm":
        _write_chatglm(directory)
        return directory
    variants = _VARIANTS | _LONG_CONTEXT | _HYBRIDS | _GROUPED_HYBRIDS
    model_class, config_class, changes, shard_bytes = variants[name]
    names = (*TINY_MODELS, *_LONG_CONTEXT, *_HYBRIDS, *_GROUPED_HYBRIDS)
    torch.manual_seed(names.index(name))
    sizes = {} if "text_config" in changes else _SIZES
    model = model_class(config_class(**{**sizes, **changes}))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.2)
            elif parameter_name.endswith("A_log"):
                parameter.uniform_(-3.0, 1.5)  # states forget some tokens at once and keep others
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory, max_shard_size=shard_bytes or "5GB")
    return directory


def same_model_for_transformers(name: str) -> Path:
    """The checkpoint from which transformers makes the model `name`: it has no ChatGLM class."""
    return tiny_model("glm-stretched-rope" if name == "chatglm" else name)


def _write_chatglm(directory: Path) -> None:
    """The GLM checkpoint in the names and layout of chatglm3-6b's and glm-4-9b-chat's own."""
    source = same_model_for_transformers("chatglm")
    glm = load_file(source / "model.safetensors")
    chatglm = {
        "transformer.embedding.word_embeddings.weight": glm["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": glm["model.norm.weight"],
        "transformer.output_layer.weight": glm["lm_head.weight"],
        "transformer.rotary_pos_emb.inv_freq": torch.zeros(4),
    }
    for layer in range(NUM_LAYERS):
        own, theirs = f"transformer.encoder.layers.{layer}", f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            chatglm[f"{own}.self_attention.query_key_value.{kind}"] = torch.cat(
                [glm[f"{theirs}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            )
        for own_part, their_part in (
            ("self_attention.dense", "self_attn.o_proj"),
            ("mlp.dense_h_to_4h", "mlp.gate_up_proj"),
            ("mlp.dense_4h_to_h", "mlp.down_proj"),
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
        ):
            chatglm[f"{own}.{own_part}.weight"] = glm[f"{theirs}.{their_part}.weight"]
    directory.mkdir()
    save_file(chatglm, directory / "model.safetensors")
    config = {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_query_key_layer_scaling": True,
        "apply_residual_connection_post_layernorm": False,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "eos_token_id": _SIZES["eos_token_id"],
        "ffn_hidden_size": _SIZES["intermediate_size"],
        "fp32_residual_connection": False,
        "hidden_size": _SIZES["hidden_size"],
        "kv_channels": _SIZES["head_dim"],
        "layernorm_epsilon": 1.5625e-07,
        "multi_query_attention": True,
        "multi_query_group_num": _SIZES["num_key_value_heads"],
        "num_attention_heads": _SIZES["num_attention_heads"],
        "num_layers": NUM_LAYERS,
        "original_rope": True,
        "padded_vocab_size": VOCAB_SIZE,
        "post_layer_norm": True,
        "rmsnorm": True,
        "rope_ratio": 50,
        "seq_length": _SIZES["max_position_embeddings"],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
