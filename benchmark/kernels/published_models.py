"""Layers of published models, by their config.json, and the steps that are measured."""

from dataclasses import dataclass
from typing import Any

Step = list[tuple[int, int]]  # (start, length) of each chunk
STATE = "linear_attention"  # the kind of layers that keep a state

_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}
_QWEN3_5_4B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}


@dataclass(frozen=True)
class PublishedLayers:
    """Layers of kinds `layer_types`. `config` is without what depends on their number, and
    `transformers_config` the name of transformers' class for it. Those of kinds `others` are not
    measured: we serve no model of states alone, and llama.cpp none of this family without both."""

    name: str
    config: dict[str, Any]
    transformers_config: str
    layer_types: tuple[str, ...]
    steps: dict[str, Step]
    others: tuple[str, ...] = ()
    quantization: dict[str, Any] | None = None

    def full_config(self, others: tuple[str, ...] = ()) -> dict[str, Any]:
        """Config of a model with these layers, then `others`, and a small vocabulary."""
        layer_types = [*self.layer_types, *others]
        return self.config | {
            "dtype": "bfloat16",
            "layer_types": layer_types,
            "num_hidden_layers": len(layer_types),
            "tie_word_embeddings": False,
            "vocab_size": 64,
        }


def _decodes(*counts: int) -> dict[str, Step]:
    return {f"{count} decode{'s' * (count > 1)}": [(200, 1)] * count for count in counts}


_STEPS: dict[str, Step] = _decodes(1, 16, 64) | {"prefill 512": [(0, 512)]}
PUBLISHED = (
    PublishedLayers(
        "Qwen3.5-4B, state",
        _QWEN3_5_4B,
        "Qwen3_5TextConfig",
        (STATE,),
        _STEPS,
        others=("full_attention",),
    ),
    PublishedLayers(
        "Qwen3.5-4B, attention",
        _QWEN3_5_4B,
        "Qwen3_5TextConfig",
        ("full_attention",),
        _STEPS,
        others=(STATE,),
    ),
    PublishedLayers(
        "gpt-oss-20b, two layers",
        _GPT_OSS,
        "GptOssConfig",
        ("sliding_attention", "full_attention"),
        _STEPS,
        quantization={"quant_method": "mxfp4"},
    ),
)
