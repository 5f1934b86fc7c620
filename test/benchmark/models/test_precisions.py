"""The formats that quality is measured in: their names, flags and checkpoints of the demo model."""

import json
from pathlib import Path

import pytest

from benchmark.models.precisions import DEMO_GROUP_SIZE, PRECISIONS
from benchmark.models.quantize_model import FORMATS
from benchmark.support.paths import DEMO_MODEL
from sgl_pipeline.args import KV_CACHE_DTYPES
from sgl_pipeline.pp_runner.model.model_spec import read_model_spec
from sgl_pipeline.pp_runner.weights.schemes import Fp8Scheme, Int4Scheme, Int8Scheme

# The checkpoint's format, the flags, and the kind of the layers' scheme and of the head's.
EXPECTED = {
    "bf16": (None, "", None, None),
    "bf16+kv-int8": (None, "--kv-cache-dtype int8", None, None),
    "bf16+kv-fp8_e4m3": (None, "--kv-cache-dtype fp8_e4m3", None, None),
    "w8a8_int8": (None, "--quantization w8a8_int8", Int8Scheme, Int8Scheme),
    "w8a8_int8+kv-int8": (
        None,
        "--quantization w8a8_int8 --kv-cache-dtype int8",
        Int8Scheme,
        Int8Scheme,
    ),
    "fp8": (None, "--quantization fp8", Fp8Scheme, None),
    "int-quantized": ("int-quantized", "", Int8Scheme, None),
    "float-quantized": ("float-quantized", "", Fp8Scheme, None),
    "pack-quantized": ("pack-quantized", "", Int4Scheme, None),
    "w4a8_int8": ("pack-quantized", "--quantization w4a8_int8", Int4Scheme, Int8Scheme),
}


def test_every_format_and_every_dtype_of_pages_is_measured() -> None:
    assert PRECISIONS.keys() == EXPECTED.keys()
    assert {one.stored for one in PRECISIONS.values()} == {None, *FORMATS}
    assert {one.kv_cache_dtype for one in PRECISIONS.values()} == set(KV_CACHE_DTYPES)
    assert all(name == one.name for name, one in PRECISIONS.items())


@pytest.mark.parametrize("name", EXPECTED)
def test_the_checkpoint_and_the_flags_give_the_format(name: str, tmp_path: Path) -> None:
    precision = PRECISIONS[name]
    stored, flags, layers, head = EXPECTED[name]
    assert " ".join(precision.flags) == flags
    path = precision.demo_checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text()).get("quantization_config", {})
    assert config.get("format") == stored
    assert (path == DEMO_MODEL) == (stored is None)
    quantization = read_model_spec(path, precision.quantization).quantization
    if layers is None:
        assert quantization is None
        return
    assert quantization is not None
    scheme = quantization.scheme_of("model.layers.0.mlp.down_proj")
    assert type(scheme) is layers
    assert type(quantization.scheme_of("lm_head")) is (head or type(None))
    if isinstance(scheme, Int4Scheme):
        assert scheme.group_size == DEMO_GROUP_SIZE
        assert scheme.rounds_rows == (name == "w4a8_int8")


def test_formats_that_share_a_checkpoint_share_its_directory(tmp_path: Path) -> None:
    path = PRECISIONS["pack-quantized"].demo_checkpoint(tmp_path)
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert PRECISIONS["w4a8_int8"].demo_checkpoint(tmp_path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
