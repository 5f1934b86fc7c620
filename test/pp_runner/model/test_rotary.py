"""Frequencies, cosines and sines of published configs, held to transformers' own."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    Ministral3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from sgl_pipeline.pp_runner.model.config_fields import ConfigFields
from sgl_pipeline.pp_runner.model.families import Family
from sgl_pipeline.pp_runner.model.rope_config import RopeConfig
from sgl_pipeline.pp_runner.model.rope_spec import RopeSpec
from sgl_pipeline.pp_runner.model.rotary import RotaryEmbedding, rotary_frequencies

CPU = torch.device("cpu")
QWEN_2_5_7B = {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "max_position_embeddings": 32768,
    "rope_theta": 1_000_000.0,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}
QWEN_3_8B = {
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1_000_000,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}
GPT_OSS_20B = {
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
# Without llama_4_scaling_beta, which scales queries by their position and not the embedding.
MINISTRAL_3_8B = {
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
DEEPSEEK_V3 = {
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
PHI_4_MINI = {
    "hidden_size": 3072,
    "num_attention_heads": 24,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [
            *(1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817),
            *(2.187582649, 2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687),
            *(4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894),
            *(8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252),
            *(16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884),
            *(32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97),
            *(33.28, 33.49, 33.5, 44.16, 47.77),
        ],
    },
}
LLAMA_3_1_8B = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}
VICUNA_7B_16K = {
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_scaling": {"type": "linear", "factor": 4.0},
}
LLAMA_2_DYNAMIC = {
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_scaling": {"type": "dynamic", "factor": 2.7},
}
GLM_4_YARN = {
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10_000.0,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}


def changed(config: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    """`config` with other rope parameters."""
    return config | {"rope_scaling": config["rope_scaling"] | parameters}


def our_spec(config: dict[str, Any], head_dim: int, context_length: int | None = None) -> RopeSpec:
    rope = RopeConfig(ConfigFields(config, {}), Family(partial_rope=True))
    return rope.spec(head_dim, context_length or rope.context_lengths().default)


def made(config_class: type[PreTrainedConfig], config: dict[str, Any]) -> PreTrainedConfig:
    """transformers', which writes into what it is given."""
    return config_class(**deepcopy(config))


def theirs(config: PreTrainedConfig, length: int | None = None) -> tuple[torch.Tensor, float]:
    """Frequencies and attention factor, of a sequence of `length`."""
    kind = config.rope_parameters["rope_type"]
    return ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length)


@pytest.mark.parametrize(
    ("config_class", "config", "head_dim"),
    [
        (LlamaConfig, LLAMA_3_1_8B, 128),
        (LlamaConfig, VICUNA_7B_16K, 128),
        (LlamaConfig, LLAMA_2_DYNAMIC, 128),
        (Qwen2Config, QWEN_2_5_7B, 128),
        (Qwen2Config, changed(QWEN_2_5_7B, attention_factor=1.3), 128),
        (Qwen2Config, changed(QWEN_2_5_7B, beta_fast=None, beta_slow=None, mscale=0), 128),
        (Qwen3Config, QWEN_3_8B, 128),
        (GptOssConfig, GPT_OSS_20B, 64),
        (Ministral3Config, MINISTRAL_3_8B, 128),
        (DeepseekV3Config, DEEPSEEK_V3, 64),
        (DeepseekV3Config, changed(DEEPSEEK_V3, mscale=1.0, mscale_all_dim=0.707), 64),
        (DeepseekV3Config, changed(DEEPSEEK_V3, mscale_all_dim=0), 64),
        (DeepseekV3Config, changed(DEEPSEEK_V3, factor=None), 64),
        (DeepseekV3Config, changed(DEEPSEEK_V3, beta_fast=1, beta_slow=1), 64),
        (Glm4Config, GLM_4_YARN, 128),
        (Phi3Config, PHI_4_MINI, 128),
        (Phi3Config, changed(PHI_4_MINI, attention_factor=1.25), 128),
        (LlamaConfig, changed(PHI_4_MINI, factor=16.0) | {"head_dim": 128}, 128),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_frequencies_and_attention_factors_are_those_of_transformers(
    config_class: type[PreTrainedConfig], config: dict[str, Any], head_dim: int
) -> None:
    expected, attention_factor = theirs(made(config_class, config))
    spec = our_spec(config, head_dim)
    torch.testing.assert_close(rotary_frequencies(spec, head_dim), expected, rtol=1e-6, atol=0)
    assert spec.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("length", [4095, 4096, 4097, 8192, 11059, 40_000])
def test_dynamic_frequencies_are_those_of_a_sequence_as_long_as_the_context(length: int) -> None:
    expected, _ = theirs(made(LlamaConfig, LLAMA_2_DYNAMIC), length)
    found = rotary_frequencies(our_spec(LLAMA_2_DYNAMIC, 128, length), 128)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("length", [4095, 4096, 4097, 131072])
def test_longrope_has_the_factors_of_a_sequence_as_long_as_the_context(length: int) -> None:
    expected, attention_factor = theirs(made(Phi3Config, PHI_4_MINI), length)
    spec = our_spec(PHI_4_MINI, 128, length)
    torch.testing.assert_close(rotary_frequencies(spec, 128), expected, rtol=1e-6, atol=0)
    assert spec.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize(
    ("embedding", "config", "context_length"),
    [
        (Qwen2RotaryEmbedding(made(Qwen2Config, QWEN_2_5_7B)), QWEN_2_5_7B, None),
        (Phi3RotaryEmbedding(made(Phi3Config, PHI_4_MINI)), PHI_4_MINI, 131072),
    ],
    ids=["yarn", "longrope"],
)
def test_the_attention_factor_is_in_cosines_and_sines(
    embedding: torch.nn.Module, config: dict[str, Any], context_length: int | None
) -> None:
    positions = torch.tensor([0, 1, 77, 4095, 4096, 32_768, 131_071])
    rotation = RotaryEmbedding(our_spec(config, 128, context_length), 128, CPU).at(positions)
    cosine, sine = embedding(torch.zeros(1), positions[None])
    pairs = rotation.cosine.shape[1]
    # An angle of 131071 is known to 0.008 in fp32, so frequencies must be the same to the bit.
    torch.testing.assert_close(rotation.cosine, cosine[0, :, :pairs], rtol=0, atol=1e-6)
    torch.testing.assert_close(rotation.sine, sine[0, :, :pairs], rtol=0, atol=1e-6)
    assert rotation.cosine[0].max() > 1.1, "position 0 has the attention factor alone"
