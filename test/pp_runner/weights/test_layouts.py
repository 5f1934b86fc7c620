"""Quantized matrices as checkpoints store them: what they stand for, and what does not fit."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.live_tensors import LiveTensors
from support.quantized_models import FORMATS, quantized_model

from sgl_pipeline.errors import CheckpointError
from sgl_pipeline.pp_runner.model.model_spec import read_model_spec
from sgl_pipeline.pp_runner.weights.checkpoint import Checkpoint, DummyWeights
from sgl_pipeline.pp_runner.weights.layouts import read_matrix
from sgl_pipeline.pp_runner.weights.quantized_weights import Int4Weight, join

MODULE, SHAPE = "model.layers.3.mlp.down_proj", (64, 96)
CPU = torch.device("cpu")


def matrix_of(path: Path, asked: str | None = None):
    spec = read_model_spec(path, asked)
    return read_matrix(Checkpoint(path, torch.float32, CPU), spec.quantization, MODULE, SHAPE)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_matrix_is_what_the_layout_says(format_name):
    model = quantized_model(format_name)
    expected = load_file(model.dequantized / "model.safetensors")[f"{MODULE}.weight"]
    matrix = matrix_of(model.path)
    assert not isinstance(matrix, torch.Tensor) and matrix.shape == SHAPE
    assert matrix.nbytes < 0.4 * expected.nbytes
    torch.testing.assert_close(matrix.dequantized(), expected, rtol=1e-6, atol=1e-7)
    part = matrix.part(slice(8, 24))
    torch.testing.assert_close(part.dequantized(), expected[8:24], rtol=1e-6, atol=1e-7)
    joined = join([part, matrix])
    assert joined is not None and not isinstance(joined, torch.Tensor)
    assert torch.equal(joined.dequantized()[16:], matrix.dequantized())


def test_matrices_of_several_kinds_are_not_joined():
    int8, int4 = (matrix_of(quantized_model(name).path) for name in ("int-quantized", "awq"))
    ordered = matrix_of(quantized_model("gptq v2, ordered").path)
    assert join([int8, int4]) is None
    assert join([int4, ordered]) is None
    assert join([int8, torch.ones(64, 96)]) is None


@pytest.mark.parametrize("format_name", ["pack-quantized", "gptq", "awq"])
def test_four_bits_are_for_rounded_rows_where_that_is_asked_for(format_name):
    path = quantized_model(format_name).path
    matrix, rounding = matrix_of(path), matrix_of(path, "w4a8_int8")
    assert not matrix.rounds_rows and rounding.rounds_rows
    assert torch.equal(matrix.dequantized(), rounding.dequantized())
    assert join([matrix, rounding]) is None
    spec = read_model_spec(path, "w4a8_int8")
    made_up = read_matrix(DummyWeights(torch.float32, CPU), spec.quantization, MODULE, SHAPE)
    assert isinstance(made_up, Int4Weight) and made_up.rounds_rows


def altered(format_name: str, tensor: str, change: Callable, tmp_path: Path) -> Path:
    """A copy of the model whose `tensor` of MODULE is what `change` makes of it; None: missing."""
    shutil.copytree(quantized_model(format_name).path, tmp_path / "altered")
    path = tmp_path / "altered" / "model.safetensors"
    tensors = load_file(path)
    found = tensors.pop(f"{MODULE}.{tensor}")
    if (changed := change(found)) is not None:
        tensors[f"{MODULE}.{tensor}"] = changed.contiguous()
    save_file(tensors, path)
    return path.parent


def missing(tensor: torch.Tensor) -> None:
    return None


def one_short(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


def with_infinity(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[0] = torch.inf
    return tensor


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(torch.uint8)[3, 5] = 0xFF
    return tensor


@pytest.mark.parametrize("change", [missing, one_short, with_infinity])
@pytest.mark.parametrize(
    ("format_name", "tensor"),
    [
        ("int-quantized", "weight_scale"),
        ("float-quantized", "weight_scale"),
        ("pack-quantized", "weight_scale"),
        ("fp8 blocks", "weight_scale_inv"),
        ("gptq", "scales"),
        ("awq", "scales"),
    ],
)
def test_scales_that_do_not_fit_are_one_line_with_their_name(format_name, tensor, change, tmp_path):
    if format_name == "fp8 blocks" and change is one_short:
        change = lambda scales: torch.ones(2, 1)  # noqa: E731, a block more
    with pytest.raises(CheckpointError) as error:
        matrix_of(altered(format_name, tensor, change, tmp_path))
    assert f"{MODULE}.{tensor}" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("format_name", "tensor", "change"),
    [
        ("int-quantized", "weight", lambda weight: weight.float()),
        ("float-quantized", "weight", with_nan),
        ("float-quantized", "weight", missing),
        ("pack-quantized", "weight_packed", one_short),
        ("pack-quantized", "weight_shape", lambda shape: shape.flip(0)),
        ("pack-quantized asymmetric, ordered", "weight_zero_point", missing),
        ("pack-quantized asymmetric, ordered", "weight_g_idx", torch.zeros_like),
        ("gptq", "qweight", lambda words: words.long()),
        ("gptq v2, ordered", "g_idx", missing),
        ("gptq v2, ordered", "g_idx", lambda groups: groups + 1),
        ("awq", "qzeros", one_short),
    ],
)
def test_other_tensors_that_do_not_fit_are_named(format_name, tensor, change, tmp_path):
    with pytest.raises(CheckpointError, match=rf"{MODULE}\.{tensor}"):
        matrix_of(altered(format_name, tensor, change, tmp_path))


def test_a_checkpoint_that_has_plain_weights_where_it_should_not_is_named(tmp_path):
    plain, quantized = (tmp_path / name for name in ("plain", "quantized"))
    shutil.copytree(quantized_model("gptq").dequantized, plain)
    shutil.copytree(quantized_model("gptq").path, quantized)
    shutil.copy(plain / "model.safetensors", quantized / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"no tensor {MODULE}\.qweight"):
        matrix_of(quantized)
    shutil.copy(quantized_model("fp8").path / "model.safetensors", plain / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"float8_e4m3fn, config\.json asks for"):
        matrix_of(plain)


@pytest.mark.parametrize("format_name", FORMATS)
def test_weights_that_are_made_up_have_the_format_too(format_name):
    spec = read_model_spec(quantized_model(format_name).path)
    source = DummyWeights(torch.float32, CPU)
    matrix = read_matrix(source, spec.quantization, MODULE, SHAPE)
    assert type(matrix) is type(matrix_of(quantized_model(format_name).path))
    assert source.loaded == {f"{MODULE}.weight": matrix.nbytes}


def test_sixteen_bits_that_are_not_finite_are_named(tmp_path):
    shutil.copytree(quantized_model("gptq").dequantized, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{MODULE}.weight"][3, 4] = torch.nan
    save_file(tensors, path)
    spec = read_model_spec(tmp_path / "model", "w8a8_int8")
    with pytest.raises(CheckpointError, match=rf"{MODULE}\.weight .*not finite"):
        read_matrix(
            Checkpoint(tmp_path / "model", torch.float32, CPU), spec.quantization, MODULE, SHAPE
        )


@pytest.mark.parametrize("format_name", [*FORMATS, "w8a8_int8"])
def test_reading_a_matrix_takes_little_more_than_what_is_in_the_file(format_name, tmp_path):
    """Of 1024 x 1024: nothing is ever whole in 32 bits, nor three times there in bytes."""
    matrix = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) / 32
    tensors, quantization = {"weight": matrix.bfloat16()}, "w8a8_int8"
    spec = read_model_spec(quantized_model("int-quantized").dequantized, quantization)
    if format_name in FORMATS:
        spec = read_model_spec(quantized_model(format_name).path)
        tensors = FORMATS[format_name].store(matrix).tensors
    tensors = {f"{MODULE}.{end}": tensor.contiguous() for end, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    file_bytes = sum(tensor.nbytes for tensor in tensors.values())
    source = Checkpoint(tmp_path, torch.bfloat16, CPU)
    with LiveTensors() as live:
        result = read_matrix(source, spec.quantization, MODULE, tuple(matrix.shape))
    assert not isinstance(result, torch.Tensor)
    assert live.peak_bytes < 2 * file_bytes + 3 * matrix.numel()
