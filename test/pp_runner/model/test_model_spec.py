"""What a config.json means, and which fields are refused by name."""

import json
import math

import pytest
import torch

from sgl_pipeline.errors import ConfigurationError, UnsupportedModelError
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import GateClamp
from sgl_pipeline.pp_runner.model.model_spec import ExpertSpec, model_spec, read_model_spec
from sgl_pipeline.pp_runner.model.rope_spec import (
    Llama3Scaling,
    PairScaling,
    RopeSpec,
    YarnScaling,
)

# As transformers 4 wrote them, shortened to what matters; sizes are those of the real models.
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN_2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
# As transformers 5 writes it.
QWEN_3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "layer_types": ["full_attention"] * 28,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_1_5_MOE_A2_7B = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
GLM_4_9B_0414 = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [151329, 151336, 151338, 151348],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151552,
}
# The repository's own code, not transformers', defines these fields.
GLM_4_9B_CHAT = {
    "architectures": ["ChatGLMModel"],
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "attn_implementation": "sdpa",
    "bias_dropout_fusion": True,
    "eos_token_id": [151329, 151336, 151338],
    "ffn_hidden_size": 13696,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "kv_channels": 128,
    "layernorm_epsilon": 1.5625e-07,
    "model_type": "chatglm",
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_layers": 40,
    "original_rope": True,
    "padded_vocab_size": 151552,
    "post_layer_norm": True,
    "rmsnorm": True,
    "rope_ratio": 500,
    "seq_length": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
MISTRAL_7B_V0_3 = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32768,
}


def test_llama_3_1_config_of_transformers_4():
    spec = model_spec(LLAMA_3_1_8B, {"eos_token_id": 7})
    assert spec.rope == RopeSpec(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert (spec.num_layers, spec.num_query_heads, spec.num_kv_heads, spec.head_dim) == (
        *(32, 32, 8, 128),
    )
    assert (spec.dtype, spec.context_length) == ("bfloat16", 131072)
    assert spec.eos_token_ids == {7, 128001, 128008, 128009}
    assert not (spec.qkv_bias or spec.output_bias or spec.mlp_bias or spec.qk_norm)


def windows(spec):
    return [attention.window for attention in spec.attentions]


def test_qwen_2_5_has_qkv_biases_and_its_sliding_window_is_off():
    spec = model_spec(QWEN_2_5_7B)
    assert spec.qkv_bias and not spec.output_bias
    assert spec.rope == RopeSpec(1000000.0)
    assert spec.eos_token_ids == {151645}


def test_qwen_3_config_of_transformers_5():
    spec = model_spec(QWEN_3_0_6B)
    assert spec.qk_norm and spec.tied_embeddings and not spec.qkv_bias
    assert (spec.head_dim, spec.dtype, spec.rope) == (128, "bfloat16", RopeSpec(1000000.0))


def test_mistral_without_a_window_is_a_plain_decoder():
    spec = model_spec(MISTRAL_7B_V0_3)
    assert (spec.architecture, spec.head_dim, spec.eos_token_ids) == (
        *("MistralForCausalLM", 128, frozenset()),
    )


def test_a_qwen_3_moe_config_of_either_transformers_has_experts_in_every_layer():
    spec = model_spec(QWEN_3_30B_A3B)
    assert spec.experts == ExpertSpec(
        num_experts=128,
        experts_per_token=8,
        inner_size=768,
        normalized=True,
        shared_inner_size=0,
        layers=frozenset(range(48)),
    )
    assert spec.qk_norm and not spec.qkv_bias
    renamed = {name: v for name, v in QWEN_3_30B_A3B.items() if name != "num_experts"}
    assert model_spec({**renamed, "num_local_experts": 128}) == spec


def test_qwen_1_5_moe_has_a_shared_expert_and_qkv_biases_unless_it_says_otherwise():
    spec = model_spec(QWEN_1_5_MOE_A2_7B)
    assert (spec.experts.inner_size, spec.experts.shared_inner_size) == (1408, 5632)
    assert spec.qkv_bias and not spec.experts.normalized
    assert not model_spec({**QWEN_1_5_MOE_A2_7B, "qkv_bias": False}).qkv_bias


def test_sparse_layers_are_every_so_many_but_the_named_ones():
    spec = model_spec({**QWEN_3_30B_A3B, "decoder_sparse_step": 3, "mlp_only_layers": [5, 8]})
    assert spec.experts.layers == {2, *range(11, 48, 3)}
    assert spec.layer_experts(2) == spec.experts
    assert spec.layer_experts(1) is None and spec.layer_experts(5) is None


def test_the_experts_of_mixtral_have_the_intermediate_size():
    experts = model_spec(MIXTRAL_8X7B).experts
    assert (experts.num_experts, experts.experts_per_token) == (8, 2)
    assert experts.normalized and experts.inner_size == 14336


def test_gpt_oss_has_clamped_experts_sinks_and_windows_of_even_layers() -> None:
    spec = model_spec(GPT_OSS_20B)
    assert spec.experts == ExpertSpec(
        num_experts=32,
        experts_per_token=4,
        inner_size=2880,
        normalized=True,
        shared_inner_size=0,
        layers=frozenset(range(24)),
        clamp=GateClamp(1.702, 7.0),
    )
    assert spec.qkv_bias and spec.output_bias and not spec.qk_norm
    assert [attention.window for attention in spec.attentions] == [128, None] * 12
    assert all(attention.has_sinks for attention in spec.attentions)
    assert spec.rope.theta == 150_000.0
    assert spec.rope.scaling == YarnScaling(32.0, 4096, 32.0, 1.0, truncated=False)
    assert spec.rope.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    assert spec.context_length == 131_072
    assert spec.quantization_method == "mxfp4"
    without_lists = {name: v for name, v in GPT_OSS_20B.items() if name != "layer_types"}
    assert model_spec(without_lists) == spec


# Fields of config.json as multimodal checkpoints of such sizes have them, towers shortened.
QWEN_3_5_TEXT = {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 248320,
}
QWEN_3_5_35B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "text_config": QWEN_3_5_TEXT,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh"},
}


def test_the_text_of_qwen_3_5_has_states_in_three_of_four_layers() -> None:
    spec = model_spec(QWEN_3_5_35B)
    assert [layer for layer in range(40) if spec.state_of(layer) is None] == [*range(3, 40, 4)]
    assert spec.has_states and spec.state_of(0) is spec.state
    assert spec.state is not None and spec.state.num_channels == 8192
    assert spec.state.bytes_per_slot("bfloat16") == 2 * 2**20 + 3 * 8192 * 2
    assert (spec.head_dim, spec.num_query_heads, spec.num_kv_heads) == (256, 16, 2)
    assert spec.rope.rotated_dims(spec.head_dim) == 64 and spec.rope.theta == 1e7
    assert spec.norm_offset == 1.0 and spec.output_gate and spec.qk_norm
    assert spec.experts is not None and spec.experts.shared_inner_size == 512
    assert spec.eos_token_ids == {248044} and spec.dtype == "bfloat16"
    assert spec.names.layer == "model.language_model.layers.{layer}"
    assert len({spec.layer_kind(layer) for layer in range(40)}) == 2
    shapes = spec.attention_shapes(16, torch.bfloat16, torch.device("cpu"))
    assert {shape.page_bytes for shape in shapes} == {0, 2 * 16 * 2 * 256 * 2}


def test_the_rotation_of_a_hybrid_goes_by_the_heads_that_it_has() -> None:
    """The first layers have none; a quarter of 256 dimensions is rotated."""

    def rope(context_length: int, **parameters: object) -> RopeSpec:
        parameters |= {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
        text = {**QWEN_3_5_TEXT, "rope_parameters": parameters, "max_position_embeddings": 4096}
        return model_spec({**QWEN_3_5_35B, "text_config": text}, None, context_length).rope

    dynamic = rope(8192, rope_type="dynamic", factor=4.0)
    assert dynamic.theta == pytest.approx(1e7 * 5 ** (64 / 62))
    factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    longrope = rope(4096, rope_type="longrope", original_max_position_embeddings=2048, **factors)
    assert longrope.scaling == PairScaling((2.0,) * 32)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_output_gate": False}, "attn_output_gate = False"),
        ({"layer_types": ["linear_attention"] * 40}, "every layer keeps a state"),
        ({"layer_types": ["sliding_attention"] * 40}, "known are full_attention, linear_attention"),
        ({"linear_num_value_heads": 24}, "must be a multiple of linear_num_key_heads 16"),
        ({"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim 5; known are 2, 3, 4"),
    ],
)
def test_a_hybrid_that_is_not_computed_is_refused_by_name(
    changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        model_spec({**QWEN_3_5_35B, "text_config": {**QWEN_3_5_TEXT, **changes}})


def test_glm_rotates_the_neighbors_of_half_a_head():
    spec = model_spec(GLM_4_9B_0414)
    assert spec.rope == RopeSpec(10000.0, rotated_share=0.5, interleaved=True)
    assert spec.rope.rotated_dims(spec.head_dim) == 64
    assert not (spec.qkv_bias or spec.output_bias)
    with_bias = model_spec({**GLM_4_9B_0414, "attention_bias": True})
    assert with_bias.qkv_bias and not with_bias.output_bias


def test_chatglm_fields_mean_what_glm_calls_otherwise():
    spec = model_spec(GLM_4_9B_CHAT)
    assert spec.rope == RopeSpec(5_000_000.0, rotated_share=0.5, interleaved=True)
    assert (spec.num_layers, spec.num_query_heads, spec.num_kv_heads, spec.head_dim) == (
        *(40, 32, 2, 128),
    )
    assert (spec.vocab_size, spec.intermediate_size, spec.context_length) == (
        *(151552, 13696, 131072),
    )
    assert spec.norm_epsilon == 1.5625e-07
    assert spec.qkv_bias and not (spec.output_bias or spec.mlp_bias or spec.qk_norm)
    assert spec.names.head == "transformer.output_layer"


def test_errors_name_a_field_as_the_config_spells_it():
    with pytest.raises(ConfigurationError, match="kv_channels is 0"):
        model_spec({**GLM_4_9B_CHAT, "kv_channels": 0})
    with pytest.raises(ConfigurationError, match=r"num_experts_per_tok 9 .* num_local_experts 8"):
        model_spec({**MIXTRAL_8X7B, "num_experts_per_tok": 9})
    with pytest.raises(ConfigurationError, match="mlp_only_layers is 'all'"):
        model_spec({**QWEN_3_30B_A3B, "mlp_only_layers": "all"})
    with pytest.raises(ConfigurationError, match="rope_ratio is -1"):
        model_spec({**GLM_4_9B_CHAT, "rope_ratio": -1})
    with pytest.raises(ConfigurationError, match=r"partial_rotary_factor is 1\.5"):
        model_spec({**GLM_4_9B_0414, "partial_rotary_factor": 1.5})


def test_the_first_chatglm_which_shares_only_the_name_is_refused():
    config = {
        "architectures": ["ChatGLMModel"],
        "hidden_size": 4096,
        "inner_hidden_size": 16384,
        "layernorm_epsilon": 1e-05,
        "max_sequence_length": 2048,
        "num_attention_heads": 32,
        "num_layers": 28,
        "position_encoding_2d": True,
        "vocab_size": 130528,
    }
    with pytest.raises(ConfigurationError, match="multi_query_attention"):
        model_spec(config)


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (QWEN_3_30B_A3B, {"shared_expert_intermediate_size": 768}, "shared_expert_intermediate"),
        (QWEN_3_30B_A3B, {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        (QWEN_3_30B_A3B, {"topk_method": "noaux_tc"}, "topk_method"),
        (MIXTRAL_8X7B, {"norm_topk_prob": False}, "norm_topk_prob"),
        (QWEN_2_5_7B, {"norm_topk_prob": True}, "norm_topk_prob"),
        (GLM_4_9B_CHAT, {"rmsnorm": False}, "rmsnorm"),
        (GLM_4_9B_CHAT, {"post_layer_norm": False}, "post_layer_norm"),
        (GLM_4_9B_CHAT, {"multi_query_attention": False}, "multi_query_attention"),
        (GLM_4_9B_CHAT, {"add_bias_linear": True}, "add_bias_linear"),
        (GLM_4_9B_CHAT, {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
        (GLM_4_9B_CHAT, {"quantization_bit": 4}, "quantization_bit"),
        (GLM_4_9B_CHAT, {"pre_seq_len": 128}, "pre_seq_len"),
        (GLM_4_9B_CHAT, {"vision_config": {"hidden_size": 1792}}, "vision_config"),
        (LLAMA_3_1_8B, {"rope_ratio": 2}, "rope_ratio"),
        (LLAMA_3_1_8B, {"sliding_window": 4096}, "sliding_window = 4096"),
        (GLM_4_9B_0414, {"layer_types": ["sliding_attention"] * 40}, "sliding_window"),
        (QWEN_3_0_6B, {"layer_types": ["sliding_attention"] * 28}, "sliding_window is None"),
        (QWEN_3_0_6B, {"layer_types": ["chunked_attention"] * 28}, "chunked_attention"),
        (QWEN_3_0_6B, {"layer_types": ["full_attention"] * 27}, "list of 28"),
        (MISTRAL_7B_V0_3, {"sliding_window": -1}, "sliding_window"),
        (LLAMA_3_1_8B, {"rope_scaling": {"type": "su", "factor": 4.0}}, "rope type 'su'"),
        (LLAMA_3_1_8B, {"rope_scaling": {"type": "linear"}}, "factor"),
        (QWEN_3_0_6B, {"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "rope_param"),
        (LLAMA_3_1_8B, {"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        (QWEN_2_5_7B, {"attention_bias": True}, "attention_bias"),
        (QWEN_3_0_6B, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA_3_1_8B, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (LLAMA_3_1_8B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (LLAMA_3_1_8B, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA_3_1_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (QWEN_2_5_7B, {"dual_chunk_attention_config": {"chunk_size": 1}}, "dual_chunk_attention"),
        (LLAMA_3_1_8B, {"embedding_multiplier": 12.0}, "embedding_multiplier"),
        (LLAMA_3_1_8B, {"num_local_experts": 8}, "num_local_experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_that_changes_the_maths_is_refused_by_name(base, changes, named):
    with pytest.raises(ConfigurationError, match=named):
        model_spec({**base, **changes})


def test_a_mistral_config_that_omits_its_window_has_the_default_one():
    config = {name: v for name, v in MISTRAL_7B_V0_3.items() if name != "sliding_window"}
    assert windows(model_spec(config)) == [4096] * 32


def test_qwen_has_windows_where_its_switch_and_its_bound_say_so():
    def windows_of(base, **changes):
        return windows(model_spec({**base, "sliding_window": 8, **changes}))

    assert windows_of(QWEN_2_5_7B) == [None] * 28
    on = {"use_sliding_window": True}
    assert windows_of(QWEN_2_5_7B, **on, max_window_layers=20) == [None] * 20 + [8] * 8
    assert windows_of(QWEN_3_30B_A3B, **on) == [8] * 48
    assert windows_of(QWEN_1_5_MOE_A2_7B, **on)[:22] == [8, None] * 10 + [8, None]
    kinds = ["full_attention", "sliding_attention"] * 14
    assert windows_of(QWEN_3_0_6B, layer_types=kinds) == [None, 8] * 14
    assert windows_of(QWEN_3_0_6B, layer_types=["full_attention"] * 28, **on) == [None] * 28


def test_layers_with_a_window_are_of_a_kind_of_their_own():
    spec = model_spec({**QWEN_2_5_7B, "use_sliding_window": True, "max_window_layers": 20})
    assert spec.layer_kind(0) == spec.layer_kind(19) != spec.layer_kind(20) == spec.layer_kind(27)


def test_fields_that_leave_the_maths_alone_are_accepted():
    harmless = {
        "logits_scaling": 1.0,
        "partial_rotary_factor": 1,
        "final_logit_softcapping": None,
        "quantization_config": None,
        "output_attentions": False,
        "rope_interleaved": False,
        "unsloth_fixed": True,
        "custom_note": "anything",
    }
    assert model_spec({**LLAMA_3_1_8B, **harmless}) == model_spec(LLAMA_3_1_8B)


@pytest.mark.parametrize("architectures", [["GemmaForCausalLM"], [], None])
def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones(architectures):
    with pytest.raises(UnsupportedModelError) as refusal:
        model_spec({**LLAMA_3_1_8B, "architectures": architectures})
    for known in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert known in str(refusal.value)


@pytest.mark.parametrize("value", [None, 0, -1, "4096", 1.5, True])
def test_a_size_that_is_no_positive_integer_is_refused(value):
    with pytest.raises(ConfigurationError, match="hidden_size"):
        model_spec({**LLAMA_3_1_8B, "hidden_size": value})


def test_query_heads_must_be_a_multiple_of_kv_heads():
    with pytest.raises(ConfigurationError, match="num_key_value_heads 5"):
        model_spec({**LLAMA_3_1_8B, "num_key_value_heads": 5})


def test_a_missing_directory_or_config_and_bad_json_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match="no such directory"):
        read_model_spec(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"holds no config\.json"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ConfigurationError, match=r"config\.json is not readable JSON"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="holds a list"):
        read_model_spec(tmp_path)


def test_generation_config_adds_its_eos_ids(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_2_5_7B))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    assert read_model_spec(tmp_path).eos_token_ids == {151643, 151645}
