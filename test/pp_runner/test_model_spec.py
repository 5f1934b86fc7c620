"""What a config.json means, and which fields are refused by name."""

import json

import pytest

from sgl_pipeline.errors import ConfigurationError, UnsupportedModelError
from sgl_pipeline.pp_runner.model_spec import RopeSpec, model_spec, read_model_spec

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
    assert spec.rope == RopeSpec(500000.0, "llama3", (8.0, 1.0, 4.0, 8192.0))
    assert (spec.num_layers, spec.num_query_heads, spec.num_kv_heads, spec.head_dim) == (
        *(32, 32, 8, 128),
    )
    assert (spec.dtype, spec.context_length) == ("bfloat16", 131072)
    assert spec.eos_token_ids == {7, 128001, 128008, 128009}
    assert not (spec.qkv_bias or spec.output_bias or spec.mlp_bias or spec.qk_norm)


def test_qwen_2_5_has_qkv_biases_and_its_sliding_window_is_off():
    spec = model_spec(QWEN_2_5_7B)
    assert spec.qkv_bias and not spec.output_bias
    assert spec.rope == RopeSpec(1000000.0)
    assert spec.eos_token_ids == {151645}


def test_qwen_3_config_of_transformers_5():
    spec = model_spec(QWEN_3_0_6B)
    assert spec.qk_norm and spec.tied_embeddings and not spec.qkv_bias
    assert (spec.head_dim, spec.dtype, spec.rope) == (128, "bfloat16", RopeSpec(1000000.0))
    # 151936 * 1024 weights against 2 * 1024 * (16 + 8) * 128 + 3 * 1024 * 3072 in a layer.
    assert spec.head_layers == pytest.approx(155_582_464 / 15_728_640)


def test_mistral_without_a_window_is_a_plain_decoder():
    spec = model_spec(MISTRAL_7B_V0_3)
    assert (spec.architecture, spec.head_dim, spec.eos_token_ids) == (
        *("MistralForCausalLM", 128, frozenset()),
    )


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (MISTRAL_7B_V0_3, {"sliding_window": 4096}, "sliding_window"),
        (QWEN_2_5_7B, {"use_sliding_window": True}, "sliding_window"),
        (QWEN_3_0_6B, {"layer_types": ["sliding_attention"] * 28}, "layer_types"),
        (LLAMA_3_1_8B, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        (LLAMA_3_1_8B, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        (LLAMA_3_1_8B, {"rope_scaling": {"type": "linear"}}, "factor"),
        (QWEN_3_0_6B, {"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "rope_param"),
        (LLAMA_3_1_8B, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
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
    with pytest.raises(UnsupportedModelError, match="sliding_window = 4096"):
        model_spec(config)


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
