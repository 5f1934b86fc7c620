"""What a config says of its rotary embedding: context lengths, overrides, and what is refused."""

import json
from typing import Any

import pytest

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec, model_spec
from sgl_pipeline.pp_runner.model.rope_overrides import overrides_of_front, with_rope_overrides
from sgl_pipeline.pp_runner.model.rope_spec import LinearScaling, PairScaling, YarnScaling

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32,
    "original_max_position_embeddings": 4096,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 64,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000,
    "vocab_size": 151936,
}


def spec_of(
    scaling: dict[str, Any] | None, context_length: int | None = None, **changes: Any
) -> ModelSpec:
    config = {**BASE, "rope_scaling": scaling, **changes}
    return model_spec(config, context_length=context_length)


@pytest.mark.parametrize(
    ("scaling", "published", "default", "longest"),
    [
        (None, 32768, 32768, 32768),
        (LLAMA3, 131072, 131072, 131072),
        ({"type": "linear", "factor": 4.0}, 4096, 16384, 16384),
        ({"type": "dynamic", "factor": 2.5}, 4096, 4096, 10240),
        (YARN, 32768, 131072, 131072),
        (YARN, 40960, 131072, 131072),
        (YARN, 131072, 131072, 131072),
        (YARN, 262144, 262144, 262144),
        ({"rope_type": "yarn", "factor": 2.0}, 4096, 8192, 8192),
        (LONGROPE, 131072, 4096, 131072),
    ],
)
def test_context_lengths_follow_the_rope_type(
    scaling: dict[str, Any] | None, published: int, default: int, longest: int
) -> None:
    spec = spec_of(scaling, max_position_embeddings=published)
    assert spec.own_context_lengths == (default, longest)
    assert spec.context_length == default
    assert spec_of(scaling, 1024, max_position_embeddings=published).context_length == 1024


def test_the_context_of_the_server_decides_about_longrope_and_dynamic_alone() -> None:
    published = {"max_position_embeddings": 131072}
    assert spec_of(LONGROPE, 4096, **published).rope.scaling == PairScaling((1.0,) * 32)
    assert spec_of(LONGROPE, 4097, **published).rope.scaling == PairScaling((2.0,) * 32)
    dynamic = {"type": "dynamic", "factor": 4.0}
    assert spec_of(dynamic, 32768).rope.theta == 1_000_000
    assert spec_of(dynamic, 65536).rope.theta == 1_000_000 * 5 ** (64 / 62)
    for scaling in (None, LLAMA3, YARN, {"type": "linear", "factor": 4.0}):
        assert spec_of(scaling, 1024).rope == spec_of(scaling, 100_000).rope


def test_the_original_context_beside_the_parameters_wins_as_in_transformers() -> None:
    scaling = spec_of(YARN, original_max_position_embeddings=8192).rope.scaling
    assert scaling == YarnScaling(4.0, 8192, fast_turns=32.0, slow_turns=1.0, truncated=True)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "mrope", "mrope_section": [16, 24, 24]}, "rope type 'mrope'"),
        ({**YARN, "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
        ({"type": "dynamic", "factor": 1.0, "alpha": 1000.0}, "alpha"),
        ({"type": "yarn"}, "yarn needs factor"),
        ({**YARN, "factor": -4}, "needs factor, a number above 0, got -4"),
        ({**YARN, "factor": float("nan")}, "factor, a number above 0, got nan"),
        ({**YARN, "attention_factor": 0}, "needs attention_factor"),
        ({**YARN, "beta_fast": "32"}, "needs beta_fast"),
        ({**YARN, "truncate": "no"}, "truncate is 'no'"),
        ({**YARN, "original_max_position_embeddings": 0.5}, "original_max_position_embeddings"),
        ({**LONGROPE, "short_factor": [1.0] * 16}, "32 numbers in short_factor.* 16 numbers"),
        ({**LONGROPE, "short_factor": None}, "32 numbers in short_factor.* None"),
        ({**LONGROPE, "short_factor": ["1"] * 32}, "needs short_factor"),
        ({"rope_type": "dynamic"}, "dynamic needs factor"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({"rope_theta": 1}, "rope_theta is 1"),
        ([4.0], "not an object"),
    ],
)
def test_a_parameter_that_is_not_computed_or_has_no_meaning_is_named(
    scaling: Any, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        spec_of(scaling)


def test_parameters_that_change_nothing_are_accepted() -> None:
    harmless = {"finetuned": True, "llama_4_scaling_beta": 0, "max_position_embeddings": 131072}
    assert spec_of({**YARN, **harmless}) == spec_of(YARN)


@pytest.mark.parametrize(
    "own",
    [
        {"rope_theta": 1_000_000, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"}},
    ],
)
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_overrides_mean_what_the_same_fields_in_the_config_mean(
    own: dict[str, Any], name: str
) -> None:
    config = {key: value for key, value in BASE.items() if key != "rope_theta"} | own
    yarn = {name: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    overridden = with_rope_overrides(config, json.dumps({"rope_scaling": yarn}))
    assert model_spec(overridden) == spec_of(YARN)


def test_an_override_keeps_the_parameters_that_it_does_not_name() -> None:
    config = {**BASE, "rope_scaling": YARN}
    longer = model_spec(with_rope_overrides(config, '{"rope_parameters": {"factor": 2.0}}'))
    assert longer.rope == spec_of({**YARN, "factor": 2.0}).rope
    assert model_spec(with_rope_overrides(config, '{"rope_theta": 5e5}')).rope.theta == 500_000
    linear = '{"rope_scaling": {"type": "linear"}, "max_position_embeddings": 8192}'
    spec = model_spec(with_rope_overrides(config, linear))
    assert (spec.rope.scaling, spec.context_length) == (LinearScaling(4.0), 32768)
    assert model_spec(with_rope_overrides(config, "{}")) == model_spec(config)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("{", "is not JSON"),
        ("[]", "not a JSON object"),
        ('{"num_hidden_layers": 2, "rope_theta": 5}', "num_hidden_layers cannot be overridden"),
        ('{"rope_scaling": "yarn"}', "rope_scaling is not a JSON object"),
        ('{"rope_parameters": null}', "rope_parameters is not a JSON object"),
        ('{"text_config": {"rope_theta": 5}}', "config.json has no text_config"),
    ],
)
def test_other_overrides_are_refused_by_name(overrides: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        model_spec(with_rope_overrides(BASE, overrides))


def test_a_length_that_the_config_spells_otherwise_is_not_overridden_in_vain() -> None:
    config = {name: v for name, v in BASE.items() if name != "max_position_embeddings"}
    with pytest.raises(ConfigurationError, match="has no max_position_embeddings"):
        with_rope_overrides(config, '{"max_position_embeddings": 65536}')


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_multimodal_config_takes_overrides_at_its_top_and_under_text_config(
    is_nested: bool,
) -> None:
    own = {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 1.0}
    text = {key: value for key, value in BASE.items() if key != "rope_theta"}
    config = {**BASE, "text_config": text | {"rope_parameters": own}, "vision_config": {}}
    given: dict[str, Any] = {"rope_scaling": YARN}
    overrides = json.dumps({"text_config": given} if is_nested else given)
    assert model_spec(with_rope_overrides(config, overrides)) == spec_of(YARN)
    told = json.loads(overrides_of_front(config, overrides, 131072))
    # SGLang replaces the parameters under `text_config`, and merges others.
    merged = {"rope_scaling": own | YARN, "max_position_embeddings": 131072}
    assert told == {"text_config": merged}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ('{"text_config": {"hidden_size": 8}}', "hidden_size cannot be overridden"),
        ('{"text_config": 8}', "text_config is not a JSON object"),
        ('{"text_config": {}, "rope_theta": 5}', "all fields in text_config, or all beside it"),
    ],
)
def test_other_overrides_of_a_multimodal_config_are_refused(overrides: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        with_rope_overrides({"text_config": BASE}, overrides)


def test_a_front_is_told_nothing_of_a_config_that_it_reads_as_we_do() -> None:
    assert overrides_of_front({"text_config": BASE}, "{}") == "{}"
    assert json.loads(overrides_of_front(BASE, "{}", 131072)) == {"max_position_embeddings": 131072}
