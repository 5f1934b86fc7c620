"""Matrix products by torch, on a CPU with the weight in oneDNN's blocked layout.

Must never keep two copies of a weight.
"""

import torch
import torch.nn.functional as F

# oneDNN's kernels for one and two rows are slower than those for four, and the one for a single row
# adds up a long input in another order: padded, a row's result is the same in every microbatch.
_FEWEST_ROWS = 4
# For every new number of rows and every shape of matrix, oneDNN compiles kernels of 0.5 to 1.5 MiB,
# in 0.4 ms and more, and keeps them until the process ends (the limit of its cache covers half of
# them): a stage that saw all steps from 4 to 2048 rows would hold gigabytes of them.
_ROW_COUNTS_PER_DOUBLING = 16


class TorchLinear:
    """`x @ weight.T + bias`, for rows x [T, in] in the weight's dtype and on its device.

    On a CPU, fp32 and bf16 weights are repacked once into oneDNN's blocked layout
    (`torch.ops.mkldnn`, what torch.compile uses for frozen weights); elsewhere this is F.linear.
    The caller drops its reference to `weight`: where it is packed, only the packed copy stays.

    Args:
        weight: [out, in].
        bias: [out], or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.is_packed = _can_be_packed(weight)
        self._weight = _pack(weight) if self.is_packed else weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out] in the dtype of `x`."""
        if not self.is_packed:
            return F.linear(x, self._weight, self._bias)
        y = torch.ops.mkldnn._linear_pointwise(
            _pad_rows(x), self._weight, self._bias, "none", [], ""
        )
        return y[: x.shape[0]]


def _pad_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with rows of zeros added, up to a row count that many steps share."""
    num_rows = x.shape[0]
    missing = padded_row_count(num_rows) - num_rows
    if missing == 0:
        return x
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


def padded_row_count(num_rows: int) -> int:
    """The least of the row counts in use that is not below `num_rows`.

    They are the multiples of 4 up to 64, then 16 in each doubling: 96 up to 2048 rows, and never
    more than a sixteenth above `num_rows` from 64 rows on.
    """
    granule = max(_FEWEST_ROWS, 2 ** (num_rows.bit_length() - 1) // _ROW_COUNTS_PER_DOUBLING)
    return max(_FEWEST_ROWS, -(-num_rows // granule) * granule)


def _can_be_packed(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
