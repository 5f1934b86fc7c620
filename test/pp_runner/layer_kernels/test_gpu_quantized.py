"""Products with quantized weights on a GPU, without one.

FP8 with a scale for each output runs by torch's own kernel for CPUs, where it has one, int8 too;
block-wise FP8, which only a Hopper has, by its definition. What they are given passes torch's
checks for CUDA tensors, on tensors without numbers, which also fail where a number is read.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.live_tensors import LiveTensors
from support.numberless_stage import RoundingWithoutNumbers
from support.scaled_products import require_scaled_products
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.cuda.gpu_memory import EXACT_SUM_BYTES, ROUNDED_INPUT_BYTES
from sgl_pipeline.pp_runner.layer_kernels.gpu_quantized import (
    GpuFp8Linear,
    GpuInt8Linear,
    GpuProducts,
    why_without_kernel,
)
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Linear
from sgl_pipeline.pp_runner.layer_kernels.row_rounding import TorchRowRounding
from sgl_pipeline.pp_runner.layer_kernels.torch_quantized import TorchQuantizedLinear
from sgl_pipeline.pp_runner.weights.quantized_weights import FP8, QuantizedWeight
from sgl_pipeline.pp_runner.weights.rounding import to_fp8, to_int4, to_int8
from sgl_pipeline.pp_runner.weights.schemes import Fp8Scheme, Int4Scheme, Int8Scheme, Scheme

INPUTS, OUTPUTS = 256, 48
ROUND = TorchRowRounding()
KINDS: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "int8": to_int8,
    "fp8": lambda matrix: to_fp8(matrix, matrix.shape[1]),
    "fp8 blocks": lambda matrix: to_fp8(matrix, 128),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def defined_scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_recipe_a: ScalingType,
    scale_b: torch.Tensor,
    scale_recipe_b: ScalingType,
    *,
    bias: torch.Tensor | None,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """`F.scaled_mm` with a scale for every row and 128 inputs of both, in fp64; it checks what
    `_scaled_block1x128_block1x128` of torch's ScaledBlas.cpp does, and that the columns of scales
    begin at multiples of 16 bytes."""
    assert scale_recipe_a is scale_recipe_b is ScalingType.BlockWise1x128
    (rows, inputs), outputs = mat_a.shape, mat_b.shape[1]
    assert mat_a.dtype == mat_b.dtype == FP8
    assert mat_a.stride() == (inputs, 1) and mat_b.stride() == (1, inputs)
    assert inputs % 16 == outputs % 16 == 0
    for scales, length in ((scale_a, rows), (scale_b, outputs)):
        assert scales.dtype == torch.float32 and scales.shape == (length, -(-inputs // 128))
        assert scales.stride() == (1, length) and length % 4 == 0
    a, b = (
        values.double() * scales.double().repeat_interleave(128, dim=1)
        for values, scales in ((mat_a, scale_a), (mat_b.t(), scale_b))
    )
    product = a @ b.t()
    return (product if bias is None else product + bias.double()).to(output_dtype)


@every_kind
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 16, 40])
def test_products_are_those_of_plain_torch(
    kind: str, num_rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "fp8 blocks":
        monkeypatch.setattr(F, "scaled_mm", defined_scaled_mm)
    elif kind == "fp8":
        require_scaled_products()
    weight, x = KINDS[kind](random(0, OUTPUTS, INPUTS)), random(1, num_rows, INPUTS)
    x[: num_rows // 3] *= 100  # rows have scales of their own
    bias = random(2, OUTPUTS) if has_bias else None
    y = GpuProducts(TorchRowRounding).linear(weight, bias)(x)
    expected = TorchQuantizedLinear(weight, bias)(x)
    assert y.shape == (num_rows, OUTPUTS) and y.dtype == torch.bfloat16
    if kind == "int8":
        assert torch.equal(y, expected)
    torch.testing.assert_close(y, expected, rtol=2.0**-7, atol=2.0**-5)


@every_kind
@pytest.mark.parametrize("num_rows", [1, 7, 16, 300])
@pytest.mark.parametrize("inputs", [128, 512])
def test_torch_accepts_what_its_kernels_are_given_and_no_number_is_read(
    kind: str, num_rows: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its checks for CUDA tensors of the same sizes and strides."""
    checked: list[str] = []
    for module, name in ((F, "scaled_mm"), (torch, "_int_mm")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, checks_for_cuda(real, name, checked))
    matrix, x, bias = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((OUTPUTS, inputs), (num_rows, inputs), (OUTPUTS,))
    )
    y = GpuProducts(TorchRowRounding).linear(KINDS[kind](matrix), bias)(x)
    assert checked == ["_int_mm" if kind == "int8" else "scaled_mm"]
    assert y.shape == (num_rows, OUTPUTS)
    assert y.dtype == torch.bfloat16 and y.device.type == "meta"


def checks_for_cuda(
    real: Callable[..., torch.Tensor], name: str, checked: list[str]
) -> Callable[..., torch.Tensor]:
    def on_cuda(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    def call(*arguments: object, **options: object) -> torch.Tensor:
        with FakeTensorMode():
            real(*map(on_cuda, arguments), **{key: on_cuda(own) for key, own in options.items()})
        checked.append(name)
        return real(*arguments, **options)

    return call


def refuse_few_rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ScalingType, int]]:
    """Has `F.scaled_mm` refuse up to 16 rows with a scale for each, as cuBLAS may; the list fills
    with the recipes and rows that it is asked for."""
    asked: list[tuple[ScalingType, int]] = []
    multiply = F.scaled_mm

    def scaled_mm(*arguments: Any, **options: Any) -> torch.Tensor:
        recipe, num_rows = arguments[3], len(arguments[0])
        asked.append((recipe, num_rows))
        if recipe is ScalingType.RowWise and num_rows <= 16:
            raise RuntimeError(
                "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling "
                "`cublasLtMatmulAlgoGetHeuristic( ltHandle, computeDesc.descriptor(), ...)`"
            )
        return multiply(*arguments, **options)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    return asked


@pytest.mark.parametrize("has_bias", [True, False])
def test_scales_come_in_after_products_that_cublas_refuses(
    has_bias: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    require_scaled_products()
    asked = refuse_few_rows(monkeypatch)
    weight = KINDS["fp8"](random(0, OUTPUTS, INPUTS))
    bias = random(2, OUTPUTS) if has_bias else None
    products = GpuProducts(TorchRowRounding, tried_rows=(1, 16, 40))
    linear = products.linear(weight, bias)
    tried = [rows for recipe, rows in asked if recipe is ScalingType.RowWise]
    assert tried == [1, 16, 40], "a layer is loaded when all are known"
    (warning,) = caplog.messages
    assert "1 rows" in warning and f"{OUTPUTS} outputs and {INPUTS} inputs" in warning
    products.linear(weight, bias)  # of another layer
    asked.clear()
    for num_rows in (1, 7, 16, 7, 40):
        x = random(1, num_rows, INPUTS)
        torch.testing.assert_close(
            linear(x), TorchQuantizedLinear(weight, bias)(x), rtol=2.0**-7, atol=2.0**-5
        )
    rowwise = [rows for recipe, rows in asked if recipe is ScalingType.RowWise]
    assert rowwise == [7, 40], "what is known to be refused is not asked for again"


def test_other_errors_of_a_product_are_not_its_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = F.scaled_mm

    def fail(*arguments: Any, **options: Any) -> torch.Tensor:
        if arguments[3] is ScalingType.RowWise:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return multiply(*arguments, **options)

    monkeypatch.setattr(F, "scaled_mm", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        GpuProducts(TorchRowRounding, tried_rows=(1,)).linear(to_fp8(random(0, 32, 64), 64))


def test_torch_accepts_the_product_without_scales_on_a_card() -> None:
    values, columns = (torch.empty(n, 64, dtype=FP8, device="meta") for n in (40, 32))
    recipe, one = ScalingType.TensorWise, torch.ones(1, device="meta")
    call = checks_for_cuda(F.scaled_mm, "scaled_mm", [])
    y = call(values, columns.t(), one, recipe, one, recipe, output_dtype=torch.float32)
    assert y.shape == (40, 32) and y.dtype == torch.float32


def test_int8_products_have_as_many_rows_as_the_kernel_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`torch._int_mm` refuses fewer than 17 rows on a GPU only."""
    given: list[int] = []
    multiply = torch._int_mm

    def keep(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        given.append(len(a))
        assert b.stride() == (1, INPUTS)
        return multiply(a, b)

    monkeypatch.setattr(torch, "_int_mm", keep)
    linear = GpuInt8Linear(to_int8(random(0, OUTPUTS, INPUTS)), ROUND)
    for num_rows in (0, 1, 17, 33):
        linear(random(1, num_rows, INPUTS))
    assert min(given) > 16 and given[-1] == 33


@pytest.mark.parametrize(
    ("scheme", "dtype", "capability", "named"),
    [
        (Int8Scheme(), torch.bfloat16, (8, 0), ""),
        (Int8Scheme(), torch.bfloat16, (7, 0), "7.5, this GPU has 7.0"),
        (Fp8Scheme((1, None)), torch.bfloat16, (8, 9), ""),
        (Fp8Scheme((None, None)), torch.bfloat16, (12, 0), ""),
        (Fp8Scheme((1, None)), torch.bfloat16, (8, 6), "8.9, this GPU has 8.6"),
        (Fp8Scheme((1, None)), torch.float16, (9, 0), "torch.float16"),
        (Fp8Scheme((128, 128)), torch.bfloat16, (9, 0), ""),
        (Fp8Scheme((128, 128)), torch.bfloat16, (8, 9), "Hopper.*8.9"),
        (Fp8Scheme((128, 128)), torch.bfloat16, (10, 0), "Hopper.*10.0"),
        (Int4Scheme(128, True), torch.bfloat16, (9, 0), "4 bits"),
    ],
)
def test_which_gpu_has_a_kernel(
    scheme: Scheme, dtype: torch.dtype, capability: tuple[int, int], named: str
) -> None:
    reason = why_without_kernel(scheme, dtype, capability)
    assert re.search(named, reason) if named else reason == ""


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            lambda: GpuFp8Linear(to_fp8(random(0, 24, 64), 64), ROUND),
            "24 outputs and 64 inputs.*16",
        ),
        (
            lambda: GpuFp8Linear(to_fp8(random(0, 32, 40), 40), ROUND),
            "32 outputs and 40 inputs.*16",
        ),
        (lambda: GpuFp8Linear(to_fp8(random(0, 32, 192), 128), ROUND), "192 inputs"),
        (lambda: GpuFp8Linear(to_fp8(random(0, 32, 256), 64), ROUND), "for each 64"),
        (
            lambda: GpuInt8Linear(to_int8(random(0, 12, 64)), ROUND),
            "12 outputs and 64 inputs.*8",
        ),
    ],
)
def test_sizes_without_a_kernel_are_refused_by_name(make: Callable[[], Linear], named: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{named}.*--stage-kernels torch"):
        make()


@every_kind
@pytest.mark.parametrize(("outputs", "inputs"), [(512, 128), (128, 512)])
def test_a_product_keeps_no_more_alive_than_a_stage_reckons_with(
    kind: str, outputs: int, inputs: int
) -> None:
    """Beside its rows and its result; the scales of rows are a fraction of that. FP8 has no sums of
    its own."""
    num_rows = 160
    matrix, x = (
        torch.empty(size, inputs, dtype=torch.bfloat16, device="meta")
        for size in (outputs, num_rows)
    )
    linear = GpuProducts(RoundingWithoutNumbers).linear(KINDS[kind](matrix))
    with LiveTensors() as live:
        y = linear(x)
    reckoned = num_rows * (ROUNDED_INPUT_BYTES * inputs + EXACT_SUM_BYTES * outputs)
    assert reckoned / 5 < live.peak_bytes < 1.1 * reckoned + y.nbytes


@pytest.mark.parametrize("round_matrix", [*KINDS.values(), lambda matrix: to_int4(matrix, 32)])
def test_a_matrix_is_rounded_on_its_own_device(
    round_matrix: Callable[[torch.Tensor], QuantizedWeight],
) -> None:
    weight = round_matrix(torch.empty(OUTPUTS, INPUTS, device="meta"))
    for name in ("values", "packed", "scales", "zeros"):
        assert getattr(weight, name, weight.scales).device.type == "meta"
