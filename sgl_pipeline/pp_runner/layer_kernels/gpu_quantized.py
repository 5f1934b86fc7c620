"""Matrix products with quantized weights on an NVIDIA GPU, by torch's kernels for 8 bits.

Built by `FlashInferKernels`; `kernel_choice.py` asks `why_without_kernel` first. Rows are rounded
in plain torch, by several small kernels a product. Nothing waits for the GPU, so CUDA graphs can
hold it. Written against torch 2.13, whose own checks of dtypes, shapes and strides run in the
tests; the kernels are untested on hardware.
"""

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.layer_kernels.backend import Linear
from sgl_pipeline.pp_runner.layer_kernels.torch_quantized import (
    round_rows_to_fp8,
    round_rows_to_int8,
)
from sgl_pipeline.pp_runner.quantization.schemes import Fp8Scheme, Int4Scheme, Scheme
from sgl_pipeline.pp_runner.quantization.weights import Fp8Weight, Int8Weight, QuantizedWeight

Capability = tuple[int, int]

_FP8_CAPABILITY = (8, 9)  # from here on tensor cores multiply FP8
_INT8_CAPABILITY = (7, 5)
_BLOCK_INPUTS = 128  # that share a scale, in the only block-wise kernel (cuBLASLt's, on Hopper)
# Its scales lie by columns, which have to begin at a multiple of 16 bytes.
_BLOCK_ROWS = 16
_FEWEST_INT8_ROWS = 32  # `torch._int_mm` takes no fewer than 17
_FP8_MULTIPLE, _INT8_MULTIPLE = 16, 8  # of inputs and outputs


def why_without_kernel(scheme: Scheme, dtype: torch.dtype, capability: Capability) -> str:
    """Why a GPU of this compute capability has no kernel for weights in `scheme` and rows in
    `dtype`; empty where it has one."""
    if isinstance(scheme, Int4Scheme):
        return "weights of 4 bits are multiplied on CPUs only"
    if dtype != torch.bfloat16:
        return f"GPUs multiply weights of 8 bits with bfloat16 only, not {dtype}"
    is_fp8 = isinstance(scheme, Fp8Scheme)
    needed = _FP8_CAPABILITY if is_fp8 else _INT8_CAPABILITY
    found = "this GPU has {}.{}".format(*capability)
    if capability < needed:
        kind = "FP8" if is_fp8 else "int8"
        return f"{kind} products need compute capability {needed[0]}.{needed[1]}, {found}"
    if isinstance(scheme, Fp8Scheme) and scheme.block[1] is not None and capability[0] != 9:
        return (
            f"FP8 products with a scale for each block need compute capability 9 (Hopper), {found}"
        )
    return ""


def gpu_quantized_linear(weight: QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
    """The product with `weight` [out, in], of a scheme that has a kernel on this GPU.

    Raises ConfigurationError for sizes that the kernels do not take.
    """
    if isinstance(weight, Int8Weight):
        return GpuInt8Linear(weight, bias)
    assert isinstance(weight, Fp8Weight), "`kernel_choice.py` refuses others"
    return GpuFp8Linear(weight, bias)


class GpuFp8Linear:
    """`x @ weight.T + bias` for bf16 rows that are rounded to e4m3, each by itself; summed in fp32.

    Args:
        weight: [out, in], multiples of 16, with a scale for each output or, where `in` is a
            multiple of 128, for each output and 128 inputs.
        bias: [out] bf16, or None.
    """

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None = None) -> None:
        outputs, inputs = weight.shape
        _require_multiples(weight, _FP8_MULTIPLE)
        self._has_blocks = weight.scales.shape[1] > 1
        if self._has_blocks and (weight.group_size != _BLOCK_INPUTS or inputs % _BLOCK_INPUTS):
            raise ConfigurationError(
                f"no GPU kernel multiplies an FP8 matrix of {inputs} inputs with a scale for each "
                f"{weight.group_size}, only multiples of {_BLOCK_INPUTS} with one for each "
                f"{_BLOCK_INPUTS}; use --stage-kernels torch"
            )
        self._group_size = weight.group_size
        self._values = weight.values.t()  # by columns, as the kernels want it
        self._scales = (
            _by_columns(weight.scales) if self._has_blocks else weight.scales.reshape(1, outputs)
        )
        self._recipe = ScalingType.BlockWise1x128 if self._has_blocks else ScalingType.RowWise
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out] for `x` [T, in]."""
        num_rows = len(x)
        if num_rows == 0:  # of the head, in a step that samples nothing
            return x.new_empty(0, self._values.shape[1])
        rows = _fill_up(x, -num_rows % _BLOCK_ROWS) if self._has_blocks else x
        values, scales = round_rows_to_fp8(rows, self._group_size)
        y = F.scaled_mm(
            values,
            self._values,
            _by_columns(scales) if self._has_blocks else scales,
            self._recipe,
            self._scales,
            self._recipe,
            bias=self._bias,
            output_dtype=x.dtype,
        )
        return y[:num_rows]


class GpuInt8Linear:
    """`x @ weight.T + bias` for bf16 rows that are rounded to 8 bits; the sums are exact, and the
    result has the bits of `TorchQuantizedLinear`.

    Args:
        weight: [out, in], multiples of 8.
        bias: [out], or None.
    """

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None = None) -> None:
        _require_multiples(weight, _INT8_MULTIPLE)
        self._values = weight.values.t()
        self._scales = weight.scales
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out] for `x` [T, in]."""
        num_rows = len(x)
        rows = _fill_up(x, max(0, _FEWEST_INT8_ROWS - num_rows))
        values, scales = round_rows_to_int8(rows)
        sums = torch._int_mm(values, self._values)[:num_rows].float()
        y = sums.mul_(self._scales).mul_(scales[:num_rows, None])
        if self._bias is not None:
            y += self._bias
        return y.to(x.dtype)


def _fill_up(x: torch.Tensor, missing: int) -> torch.Tensor:
    """`x` [T, in] with `missing` rows of zeros."""
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _by_columns(scales: torch.Tensor) -> torch.Tensor:
    """The same [R, G], with strides (1, R)."""
    return scales.t().clone(memory_format=torch.contiguous_format).t()


def _require_multiples(weight: QuantizedWeight, multiple: int) -> None:
    outputs, inputs = weight.shape
    if outputs % multiple or inputs % multiple:
        raise ConfigurationError(
            f"no GPU kernel multiplies a quantized matrix of {outputs} outputs and {inputs} "
            f"inputs, which are no multiples of {multiple}; use --stage-kernels torch"
        )
