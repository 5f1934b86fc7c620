"""`quantization_config` and `--quantization`: what is read, and what is refused by name."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from support.quantized_models import FORMATS, KV_CACHE_SCHEME

from sgl_pipeline.errors import ConfigurationError, UnsupportedModelError
from sgl_pipeline.pp_runner.weights.quantization_config import (
    choose_quantization,
    read_quantization,
)
from sgl_pipeline.pp_runner.weights.schemes import (
    Fp8Scheme,
    Int4Scheme,
    Int8Scheme,
    Layout,
    Quantization,
)

Q_PROJ = "model.layers.3.self_attn.q_proj"
GROUP = ("config_groups", "group_0")


def read(config: dict[str, Any]) -> Quantization:
    quantization = read_quantization(config, "lm_head")
    assert quantization is not None
    return quantization


@pytest.mark.parametrize(
    ("name", "scheme", "layout"),
    [
        ("int-quantized", Int8Scheme(), Layout.COMPRESSED_TENSORS),
        ("float-quantized", Fp8Scheme((1, None)), Layout.COMPRESSED_TENSORS),
        ("pack-quantized", Int4Scheme(32, True), Layout.COMPRESSED_TENSORS),
        (
            "pack-quantized asymmetric, ordered",
            Int4Scheme(32, False, has_order=True),
            Layout.COMPRESSED_TENSORS,
        ),
        ("fp8", Fp8Scheme((None, None)), Layout.FP8),
        ("fp8 blocks", Fp8Scheme((128, 128)), Layout.FP8),
        ("gptq", Int4Scheme(32, False), Layout.GPTQ),
        ("gptq v2, ordered", Int4Scheme(32, False, has_order=True), Layout.GPTQ_V2),
        ("awq", Int4Scheme(32, False), Layout.AWQ),
    ],
)
def test_the_published_configs(name, scheme, layout):
    quantization = read(FORMATS[name].config)
    assert quantization.scheme_of(Q_PROJ) == scheme and quantization.layout is layout
    assert quantization.scheme_of("lm_head") is None


def test_no_quantization():
    assert read_quantization(None, "lm_head") is None
    assert read_quantization({}, "lm_head") is None


@pytest.mark.parametrize("method", ["bitsandbytes", None, 3, "modelopt"])
def test_an_unknown_method_is_named_beside_the_known_ones(method):
    with pytest.raises(
        UnsupportedModelError, match=r"known are compressed-tensors, fp8, gptq, awq"
    ):
        read_quantization({"quant_method": method}, "lm_head")


def changed(name: str, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(FORMATS[name].config)
    inside = config
    if path[0] == "kv_cache_scheme":
        config["kv_cache_scheme"] = dict(KV_CACHE_SCHEME)
    for part in path[:-1]:
        inside = inside[part]
    inside[path[-1]] = value
    return config


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("int-quantized", ("kv_cache_scheme", "type"), "int"),
        ("int-quantized", ("kv_cache_scheme", "strategy"), "attn_head"),
        ("int-quantized", ("kv_cache_scheme", "dynamic"), True),
        ("int-quantized", ("kv_cache_scheme", "symmetric"), False),
        ("int-quantized", ("kv_cache_scheme", "something_new"), 1),
        ("int-quantized", ("sparsity_config",), {"format": "sparse-24-bitmask"}),
        ("int-quantized", ("transform_config",), {"config_groups": {"u": {}}}),
        ("int-quantized", (*GROUP, "output_activations"), {"num_bits": 8}),
        ("int-quantized", (*GROUP, "weights", "symmetric"), False),
        ("int-quantized", (*GROUP, "weights", "strategy"), "tensor"),
        ("int-quantized", (*GROUP, "weights", "num_bits"), 6),
        ("int-quantized", (*GROUP, "weights", "dynamic"), True),
        ("int-quantized", (*GROUP, "input_activations", "dynamic"), False),
        ("int-quantized", (*GROUP, "input_activations", "strategy"), "tensor"),
        ("int-quantized", (*GROUP, "input_activations", "symmetric"), False),
        ("int-quantized", (*GROUP, "input_activations"), None),
        ("int-quantized", (*GROUP, "targets"), "Linear"),
        ("int-quantized", ("ignore",), [3]),
        ("int-quantized", ("something_new",), True),
        ("float-quantized", (*GROUP, "weights", "something_new"), 1),
        ("float-quantized", (*GROUP, "weights", "strategy"), "group"),
        ("pack-quantized", (*GROUP, "input_activations"), {"num_bits": 8}),
        ("pack-quantized", (*GROUP, "weights", "group_size"), 16),
        ("pack-quantized", (*GROUP, "weights", "actorder"), "other"),
        ("fp8", ("activation_scheme",), "static"),
        ("fp8", ("weight_block_size",), [64, 64]),
        ("fp8", ("fmt",), "e5m2"),
        ("fp8", ("scale_fmt",), "ue8m0"),
        ("gptq", ("bits",), 8),
        ("gptq", ("bits",), True),
        ("gptq", ("group_size",), 48),
        ("gptq", ("dynamic",), {"+:.*": {"bits": 8}}),
        ("gptq", ("dynamic",), {".*": {"bits": 8}}),
        ("gptq", ("dynamic",), {"-:(": {}}),
        ("gptq", ("dynamic",), {"+:(": {}}),
        ("gptq", ("dynamic",), ["-:.*attn.*"]),
        ("gptq", ("checkpoint_format",), "marlin"),
        ("gptq", ("is_marlin_format",), True),
        ("awq", ("version",), "gemv"),
        ("awq", ("zero_point",), False),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name, path, value):
    with pytest.raises(UnsupportedModelError) as error:
        read(changed(name, path, value))
    assert path[-1] in str(error.value) and "\n" not in str(error.value)


def test_a_format_that_does_not_fit_the_bits_is_refused():
    with pytest.raises(UnsupportedModelError, match="'marlin-24'"):
        read(changed("pack-quantized", ("format",), "marlin-24"))


def test_which_matrices_are_quantized():
    groups = copy.deepcopy(FORMATS["int-quantized"].config["config_groups"])
    groups["group_1"] = copy.deepcopy(FORMATS["pack-quantized"].config["config_groups"]["group_0"])
    groups["group_1"]["format"] = "pack-quantized"
    groups["group_0"]["targets"] = ["re:.*self_attn.*"]
    config = FORMATS["int-quantized"].config | {
        "config_groups": groups,
        "ignore": ["lm_head", "re:.*layers[.]1[.].*down_proj"],
    }
    quantization = read(config)
    assert quantization.scheme_of(Q_PROJ) == Int8Scheme()
    assert quantization.scheme_of("model.layers.0.mlp.down_proj") == Int4Scheme(32, True)
    assert quantization.scheme_of("model.layers.1.mlp.down_proj") is None
    blocks = read(FORMATS["fp8 blocks"].config)
    assert blocks.scheme_of("model.layers.2.mlp.up_proj") is None
    assert blocks.scheme_of("model.layers.22.mlp.up_proj") is not None
    without_attention = read(FORMATS["gptq without attention"].config)
    for name in (Q_PROJ, "model.language_model.layers.3.linear_attn.in_proj_qkv", "lm_head"):
        assert without_attention.scheme_of(name) is None
    assert without_attention.scheme_of("model.layers.0.mlp.up_proj") == Int4Scheme(32, False)
    with_head = read(FORMATS["gptq"].config | {"lm_head": True})
    assert with_head.scheme_of("lm_head") == Int4Scheme(32, False)


@pytest.mark.parametrize(
    ("entries", "left_out"),
    [
        (("+:.*down_proj", r"-:.*layers\.0\..*"), {"model.layers.0.mlp.up_proj"}),
        ((".*down_proj", r"-:.*layers\.0\..*"), {"model.layers.0.mlp.up_proj"}),
        (
            (r"-:.*layers\.0\..*", "+:.*down_proj"),
            {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"},
        ),
        # Patterns begin where the name does, and need not reach its end.
        (("-:down_proj", "-:model.layers.1"), {"model.layers.1.mlp.down_proj"}),
    ],
)
def test_the_first_pattern_that_matches_a_matrix_counts(
    entries: tuple[str, ...], left_out: set[str]
) -> None:
    quantization = read(FORMATS["gptq"].config | {"dynamic": {entry: {} for entry in entries}})
    names = [f"model.layers.{name}_proj" for name in ("0.mlp.up", "0.mlp.down", "1.mlp.down")]
    assert {name for name in names if quantization.scheme_of(name) is None} == left_out
    assert quantization.scheme_of("lm_head") is None


def test_sixteen_bits_are_rounded_on_request_and_nothing_else_is():
    online = choose_quantization("w8a8_int8", None, "lm_head")
    assert online is not None and online.layout is Layout.SIXTEEN_BITS
    assert online.scheme_of(Q_PROJ) == online.scheme_of("lm_head") == Int8Scheme()
    fp8 = choose_quantization("fp8", None, "lm_head")
    assert fp8 is not None and fp8.layout is Layout.SIXTEEN_BITS
    assert fp8.scheme_of(Q_PROJ) == Fp8Scheme((1, None))
    assert fp8.scheme_of("lm_head") is None
    int8, awq = read(FORMATS["int-quantized"].config), read(FORMATS["awq"].config)
    assert choose_quantization(None, awq, "lm_head") is awq
    assert choose_quantization("awq", awq, "lm_head") is awq
    assert choose_quantization("w8a8_int8", int8, "lm_head") is int8
    for asked, found in [("w8a8_int8", awq), ("gptq", awq), ("awq", None), ("fp8", awq)]:
        with pytest.raises(ConfigurationError, match=f"--quantization {asked}"):
            choose_quantization(asked, found, "lm_head")


def test_rows_that_meet_four_bits_are_rounded_on_request_and_a_head_of_sixteen_bits_is():
    int8, awq = read(FORMATS["int-quantized"].config), read(FORMATS["awq"].config)
    rounding = choose_quantization("w4a8_int8", awq, "lm_head")
    assert rounding is not None and rounding.method == "w4a8_int8"
    assert rounding.scheme_of(Q_PROJ) == replace(awq.scheme_of(Q_PROJ), rounds_rows=True)
    assert rounding.layout_of(Q_PROJ) is awq.layout
    assert (rounding.scheme_of("lm_head"), awq.scheme_of("lm_head")) == (Int8Scheme(), None)
    assert rounding.layout_of("lm_head") is Layout.SIXTEEN_BITS
    own_head = read(FORMATS["gptq"].config | {"lm_head": True})
    rounding = choose_quantization("w4a8_int8", own_head, "lm_head")
    assert rounding is not None and rounding.layout_of("lm_head") is own_head.layout
    assert rounding.scheme_of("lm_head") == replace(own_head.scheme_of(Q_PROJ), rounds_rows=True)
    # The table of the embedding has 16 bits, whatever the config says of a head.
    tied = choose_quantization("w4a8_int8", own_head, "lm_head", has_tied_head=True)
    assert tied is not None and tied.layout_of("lm_head") is Layout.SIXTEEN_BITS
    assert tied.scheme_of("lm_head") == Int8Scheme()
    with pytest.raises(ConfigurationError, match=r"w4a8_int8 is for checkpoints of 4 or 16 bits"):
        choose_quantization("w4a8_int8", int8, "lm_head")


def test_sixteen_bits_are_rounded_to_four_in_small_groups_and_the_head_to_eight():
    made = choose_quantization("w4a8_int8", None, "lm_head", has_tied_head=True)
    assert made is not None and made.method == "w4a8_int8"
    assert made.scheme_of(Q_PROJ) == Int4Scheme(32, is_symmetric=True, rounds_rows=True)
    assert made.scheme_of("lm_head") == Int8Scheme()
    assert {made.layout_of(name) for name in (Q_PROJ, "lm_head")} == {Layout.SIXTEEN_BITS}
