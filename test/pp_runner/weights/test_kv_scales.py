"""Scales of keys and values from a checkpoint: pages hold other numbers, all else is the same."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.local_pipeline import LocalPipeline
from support.quantized_models import KV_CACHE_SCHEME, quantized_model
from test_token_identity import make_requests

from sgl_pipeline.errors import CheckpointError
from sgl_pipeline.pp_runner.base.kv_format import FP8, encode
from sgl_pipeline.pp_runner.weights.quantized_weights import scale_rows
from sgl_pipeline.pp_runner.weights.rounding import to_fp8, to_int4, to_int8

NUM_LAYERS = 6
# Rounded up to powers of two: 2^-3 and 2^2.
KEY_SCALE, VALUE_SCALE = 0.1, 3.0
KEY_DIVISOR, VALUE_DIVISOR = 0.125, 4.0
# With norms of the heads, and with biases and none.
MODELS = ("qwen3", "llama-biases-linear-rope")


def with_scales(
    path: Path,
    model: str,
    scales: dict[str, float],
    scheme: dict[str, object] | None = KV_CACHE_SCHEME,
) -> Path:
    """A copy of the tiny `model` in int8, whose layers have these scales."""
    shutil.copytree(quantized_model("int-quantized", model).path, path)
    tensors = load_file(path / "model.safetensors")
    for layer in range(NUM_LAYERS):
        for name, scale in scales.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale]).bfloat16()
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (path / "config.json").write_text(json.dumps(config))
    return path


def served(path: Path, kv_cache_dtype: str) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The first tokens of some answers, and the first layer's keys and values of the prompts."""
    pipeline = LocalPipeline(path, (NUM_LAYERS,), dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    answers = pipeline.run(make_requests(3, max_new_tokens=1))
    return answers, list(pipeline.runners[0].held_layers.kv_pool.pages(0))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("scheme", "prefixes"),
    [(KV_CACHE_SCHEME, ("", "")), (None, ("", "")), (None, ("k_proj.", "v_proj."))],
    ids=["named", "in the files alone", "with the projections"],
)
def test_pages_hold_what_is_left_of_keys_and_values_and_tokens_stay_the_same(
    model: str, scheme: dict[str, object] | None, prefixes: tuple[str, str], tmp_path: Path
) -> None:
    """In 16 bits all is exact; in e4m3 what is rounded is what the scales leave."""
    plain = quantized_model("int-quantized", model).path
    scales = {f"{prefixes[0]}k_scale": KEY_SCALE, f"{prefixes[1]}v_scale": VALUE_SCALE}
    scaled = with_scales(tmp_path / "scaled", model, scales, scheme)
    answers, pages = served(plain, "auto")
    found_answers, found_pages = served(scaled, "auto")
    assert found_answers == answers
    _, codes = served(scaled, "fp8_e4m3")
    for store, found, coded, divisor in zip(
        pages, found_pages, codes, (KEY_DIVISOR, VALUE_DIVISOR), strict=True
    ):
        assert store.abs().max() > 0
        assert torch.equal(found, store / divisor)
        expected = encode(store / divisor, FP8)
        assert torch.equal(coded.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("scales", "named"),
    [
        ({"k_scale": 1.0}, "no tensor model.layers.0.self_attn.v_scale"),
        ({"k_scale": 0.0, "v_scale": 1.0}, "self_attn.k_scale is 0.0"),
        ({"k_scale": 1.0, "v_scale": float("nan")}, "self_attn.v_scale is nan"),
        ({"k_scale": 1e30, "v_scale": 1.0}, "self_attn.k_scale is .*2\\^"),
    ],
)
def test_scales_that_are_missing_or_cannot_be_are_named(
    scales: dict[str, float], named: str, tmp_path: Path
) -> None:
    path = with_scales(tmp_path / "scaled", "qwen3", scales)
    with pytest.raises(CheckpointError, match=named):
        LocalPipeline(path, (NUM_LAYERS,), dtype="bfloat16")


@pytest.mark.parametrize(
    "quantize",
    [
        to_int8,
        lambda matrix: to_fp8(matrix, 32),
        lambda matrix: to_int4(matrix, 32),
        torch.Tensor.bfloat16,
    ],
)
def test_rows_of_every_kind_are_scaled_exactly(quantize) -> None:
    matrix = quantize(torch.randn(6, 64))
    factors = torch.tensor([1.0, 2.0, 0.25, 8.0, 1.0, 0.5])
    numbers = [
        own.float() if isinstance(own, torch.Tensor) else own.dequantized()
        for own in (matrix, scale_rows(matrix, factors))
    ]
    assert torch.equal(numbers[1], numbers[0] * factors[:, None])
