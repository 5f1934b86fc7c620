"""Matrix products with quantized weights on an NVIDIA GPU, by torch's kernels for 8 bits.

`why_without_kernel` must be asked first. A product in FP8 is two kernels: rows are rounded
(`row_rounding.py`), then multiplied. Nothing waits for the GPU, so CUDA graphs can hold it. Written
against torch 2.13, whose own checks of dtypes, shapes and strides run in the tests; it has run with
2.11 on an H200.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Linear
from sgl_pipeline.pp_runner.layer_kernels.row_rounding import RowRounding, by_columns
from sgl_pipeline.pp_runner.weights.quantized_weights import Fp8Weight, Int8Weight, QuantizedWeight
from sgl_pipeline.pp_runner.weights.schemes import Fp8Scheme, Int4Scheme, Scheme

logger = logging.getLogger(__name__)

Capability = tuple[int, int]
Shape = tuple[int, int]  # outputs and inputs

_FP8_CAPABILITY = (8, 9)  # from here on tensor cores multiply FP8
_INT8_CAPABILITY = (7, 5)
_BLOCK_INPUTS = 128  # that share a scale, in the only block-wise kernel (cuBLASLt's, on Hopper)
# Its scales lie by columns, which have to begin at a multiple of 16 bytes.
_BLOCK_ROWS = 16
_FEWEST_INT8_ROWS = 32  # `torch._int_mm` takes no fewer than 17
_FP8_MULTIPLE, _INT8_MULTIPLE = 16, 8  # of inputs and outputs
_NOT_SUPPORTED = "CUBLAS_STATUS_NOT_SUPPORTED"  # in torch's error message


def why_without_kernel(scheme: Scheme, dtype: torch.dtype, capability: Capability) -> str:
    """The reason why a GPU of this compute capability has no kernel for weights in `scheme` and
    rows in `dtype`; empty if it has one."""
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


class GpuProducts:
    """The products with quantized weights of a stage.

    Args:
        open_rounding: called before the first product.
        tried_rows: numbers of rows with which each product is tried when a layer is loaded, so that
            compiling and refusals happen then, not in a request.
    """

    def __init__(
        self, open_rounding: Callable[[], RowRounding], tried_rows: Sequence[int] = ()
    ) -> None:
        self._open_rounding = open_rounding
        self._tried_rows = tried_rows
        self._tried: set[tuple[str, Shape, bool]] = set()
        self._refusals: dict[Shape, Refusals] = {}

    @cached_property
    def rounding(self) -> RowRounding:
        """Raises ConfigurationError if this machine does not have it."""
        return self._open_rounding()

    def linear(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> Linear:
        """The product with `weight` [out, in], of a scheme that has a kernel on this GPU.

        Raises ConfigurationError for sizes that the kernels do not support.
        """
        linear: Linear
        if isinstance(weight, Int8Weight):
            linear = GpuInt8Linear(weight, self.rounding, bias)
        else:
            assert isinstance(weight, Fp8Weight), "`kernel_choice.py` refuses others"
            refusals = self._refusals.setdefault(weight.shape, Refusals(weight.shape))
            linear = GpuFp8Linear(weight, self.rounding, bias, refusals)
        kind = (f"{type(weight).__name__} {weight.scales.shape}", weight.shape, bias is not None)
        if kind not in self._tried:
            self._tried.add(kind)
            inputs, device = weight.shape[1], weight.scales.device
            for num_rows in self._tried_rows:
                linear(torch.zeros(num_rows, inputs, dtype=weight.dtype, device=device))
        return linear


class Refusals:
    """The numbers of rows with which cuBLAS has no FP8 product, with a scale for each row, by
    matrices of a shape. They occur on Hopper with few rows and many inputs (reported for an H100 in
    torchao's issue 4582)."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._refused: set[int] = set()

    def __contains__(self, num_rows: int) -> bool:
        return num_rows in self._refused

    def add(self, num_rows: int) -> None:
        if not self._refused:
            logger.warning(
                "cuBLAS refuses FP8 products of %d rows with a scale for each by a matrix of %d "
                "outputs and %d inputs: with this number, and others that it refuses, scales come "
                "in after the product, by three kernels more",
                num_rows,
                *self._shape,
            )
        self._refused.add(num_rows)


class GpuFp8Linear:
    """`x @ weight.T + bias` for bf16 rows that are rounded to e4m3, each by itself; summed in fp32.

    Args:
        weight: [out, in], multiples of 16, with a scale for each output or, where `in` is a
            multiple of 128, for each output and 128 inputs.
        bias: [out] bf16, or None.
        refusals: known refusals for matrices of this shape.
    """

    def __init__(
        self,
        weight: Fp8Weight,
        rounding: RowRounding,
        bias: torch.Tensor | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        outputs, inputs = weight.shape
        _require_multiples(weight, _FP8_MULTIPLE)
        self._has_blocks = weight.scales.shape[1] > 1
        if self._has_blocks and (weight.group_size != _BLOCK_INPUTS or inputs % _BLOCK_INPUTS):
            raise ConfigurationError(
                f"no GPU kernel multiplies an FP8 matrix of {inputs} inputs with a scale for each "
                f"{weight.group_size}, only multiples of {_BLOCK_INPUTS} with one for each "
                f"{_BLOCK_INPUTS}; use --stage-kernels torch"
            )
        self._rounding = rounding
        self._group_size = weight.group_size
        self._values = weight.values.t()  # by columns, as the kernels want it
        self._scales = (
            by_columns(weight.scales) if self._has_blocks else weight.scales.reshape(1, outputs)
        )
        self._recipe = ScalingType.BlockWise1x128 if self._has_blocks else ScalingType.RowWise
        self._one = weight.scales.new_ones(1)
        self._bias = bias
        self._refusals = refusals or Refusals(weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out] for `x` [T, in]."""
        num_rows = len(x)
        if num_rows == 0:  # of the head, in a step that samples nothing
            return x.new_empty(0, self._values.shape[1])
        filled = num_rows + (-num_rows % _BLOCK_ROWS if self._has_blocks else 0)
        values, scales = self._rounding.to_fp8(x, self._group_size, filled)
        if not self._has_blocks:
            scales = scales[:, 0, None]  # torch asks for a stride of 1, of one number too
        if filled in self._refusals:
            return self._scaled_after(values, scales, x.dtype)
        try:
            y = F.scaled_mm(
                values,
                self._values,
                scales,
                self._recipe,
                self._scales,
                self._recipe,
                bias=self._bias,
                output_dtype=x.dtype,
            )
        except RuntimeError as error:
            # It is raised before anything is launched. The products in blocks have no other way.
            if self._has_blocks or _NOT_SUPPORTED not in str(error):
                raise
            self._refusals.add(filled)
            return self._scaled_after(values, scales, x.dtype)
        return y[:num_rows]

    def _scaled_after(
        self, values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The same numbers: a scale for each row and output comes out of the sum."""
        recipe = ScalingType.TensorWise
        y = F.scaled_mm(
            values, self._values, self._one, recipe, self._one, recipe, output_dtype=torch.float32
        )
        y.mul_(scales).mul_(self._scales)
        return (y if self._bias is None else y.add_(self._bias)).to(dtype)


class GpuInt8Linear:
    """`x @ weight.T + bias` for bf16 rows that are rounded to 8 bits; the sums are exact, and the
    result has the bits of `TorchQuantizedLinear`.

    Args:
        weight: [out, in], multiples of 8.
        bias: [out], or None.
    """

    def __init__(
        self, weight: Int8Weight, rounding: RowRounding, bias: torch.Tensor | None = None
    ) -> None:
        _require_multiples(weight, _INT8_MULTIPLE)
        self._rounding = rounding
        self._values = weight.values.t()
        self._scales = weight.scales
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out] for `x` [T, in]."""
        num_rows = len(x)
        values, scales = self._rounding.to_int8(x, max(num_rows, _FEWEST_INT8_ROWS))
        sums = torch._int_mm(values, self._values)[:num_rows].float()
        y = sums.mul_(self._scales).mul_(scales[:num_rows, None])
        if self._bias is not None:
            y += self._bias
        return y.to(x.dtype)


def _require_multiples(weight: QuantizedWeight, multiple: int) -> None:
    outputs, inputs = weight.shape
    if outputs % multiple or inputs % multiple:
        raise ConfigurationError(
            f"no GPU kernel multiplies a quantized matrix of {outputs} outputs and {inputs} "
            f"inputs, which are not multiples of {multiple}; use --stage-kernels torch"
        )
