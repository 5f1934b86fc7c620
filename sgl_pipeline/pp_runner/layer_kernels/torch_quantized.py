"""Products with quantized weights in plain torch, for machines without the compiled ones'
instructions, and for tests of those.

Slow, because the weight is converted anew at each call, some outputs at a time; exact, because only
the format's own rounding happens. On a CPU a row has the same bits in any microbatch.
"""

import torch
import torch.nn.functional as F

from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Linear
from sgl_pipeline.pp_runner.layer_kernels.torch_linear import TorchLinear
from sgl_pipeline.pp_runner.weights.quantized_weights import (
    FP8,
    FP8_LARGEST,
    INT8_LARGEST,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Matrix,
    QuantizedWeight,
)

_NUMBERS_AT_ONCE = 2**22
_SMALLEST_ROW = 2.0**-100  # as in the C++ sources


def torch_linear(weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
    """The product of plain torch with a weight of any kind."""
    if isinstance(weight, torch.Tensor):
        return TorchLinear(weight, bias)
    return TorchQuantizedLinear(weight, bias)


class TorchQuantizedLinear:
    """`x @ weight.T + bias` for rows x [T, in] in the weight's dtype.

    Args:
        weight: [out, in].
        bias: [out], or None.
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out] in the dtype of `x`."""
        weight = self._weight
        assert x.shape[1] == weight.shape[1] and x.dtype == weight.dtype
        outputs, inputs = weight.shape
        y = x.new_empty(len(x), outputs)
        step = max(1, _NUMBERS_AT_ONCE // inputs)
        for start in range(0, outputs, step):
            part = slice(start, start + step)
            product = _product(x, weight.part(part))
            if self._bias is not None:
                product = product + self._bias[part]
            y[:, part] = product.to(x.dtype)
        return y


def _product(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """[T, out] fp32."""
    if isinstance(weight, Int4Weight) and weight.rounds_rows:
        values, scales = round_rows_to_int8(x)
        return TorchLinear(weight.dequantized())(values.float()) * scales[:, None]
    if isinstance(weight, Int8Weight):
        values, scales = round_rows_to_int8(x)
        # Every product and sum of these is exact in fp64, whatever their order.
        sums = (values.double() @ weight.values.double().T).float()
        return sums * weight.scales * scales[:, None]
    rows = x.float()
    if isinstance(weight, Fp8Weight):
        rows = expand_rows(*round_rows_to_fp8(x, weight.group_size), weight.group_size)
    return TorchLinear(weight.dequantized())(rows)


def round_rows_to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest `values` [T, in] int8, ties to even, and `scales` [T] fp32, whose products are
    near `x` [T, in]: the largest of a row is 127 or -127 (vLLM's `dynamic_scaled_int8_quant`)."""
    largest = x.abs().amax(dim=1).float()
    values = (x * _factors(largest, INT8_LARGEST)[:, None]).round_().to(torch.int8)
    return values, largest / INT8_LARGEST


def round_rows_to_fp8(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest `values` [T, in] e4m3, and `scales` [T, G] fp32 of each group of a row: the
    largest of a group is 448 or -448 (vLLM's `dynamic_per_token_scaled_fp8_quant`). The last group
    may have fewer than `group_size` inputs."""
    inputs = x.shape[1]
    groups = F.pad(x, (0, -inputs % group_size)).unflatten(1, (-1, group_size))
    largest = groups.abs().amax(dim=2).float()
    scaled = groups * _factors(largest, FP8_LARGEST)[..., None]
    values = scaled.clamp_(-FP8_LARGEST, FP8_LARGEST).to(FP8)
    return values.flatten(1)[:, :inputs], largest / FP8_LARGEST


def expand_rows(values: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """The rows [T, in] fp32 that values and scales of `round_rows_to_fp8` represent."""
    return values.float() * scales.repeat_interleave(group_size, dim=1)[:, : values.shape[1]]


def _factors(largest: torch.Tensor, most: float) -> torch.Tensor:
    """Factors that turn the largest numbers into `most`; 0 where these are too small for a
    divisor."""
    quotients = torch.full_like(largest, most) / largest  # a plain number would be rounded twice
    return torch.where(largest > _SMALLEST_ROW, quotients, 0.0)
