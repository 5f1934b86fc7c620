"""The contents of KV pages: numbers, or codes of 8 bits.

The dtype of the pages decides which. `int8`: a row (a head's key or value of one token) is D codes
and the scale of them all, 4 bytes of fp32 behind them. `float8_e4m3fn`: the nearest numbers of that
format, without a scale, and its largest for numbers beyond. Any other dtype: the numbers.

The definition of the codes is in plain torch; `cpu_kernels/kv_codes.h` does the same bit for bit. A
code depends on its own row alone, and decoded numbers are rounded to the model's dtype, so a row of
the model has the same bits in any microbatch.
"""

import torch

FP8 = torch.float8_e4m3fn
# The pages' dtype for a value of --kv-cache-dtype; with `auto` it is the model's.
CODED_DTYPES = {"fp8_e4m3": FP8, "int8": torch.int8}

_LARGEST_INT8, _LARGEST_FP8 = 127.0, 448.0
_SCALE_BYTES = 4
# Largest number of a row, at least: below it the scale of int8 could run out of fp32.
_SMALLEST_RANGE = 2.0**-100


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a row in pages of `dtype`."""
    return head_dim + _SCALE_BYTES if dtype == torch.int8 else head_dim


def head_dim_of(pages: torch.Tensor) -> int:
    """D of key or value `pages` [N, S, Hkv, row width]."""
    return pages.shape[-1] - (_SCALE_BYTES if pages.dtype == torch.int8 else 0)


def encode(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [..., row width] of `dtype` that hold `numbers` [..., D]."""
    if dtype == FP8:
        return numbers.float().clamp(-_LARGEST_FP8, _LARGEST_FP8).to(FP8)
    if dtype != torch.int8:
        return numbers
    numbers = numbers.float()
    largest = numbers.abs().amax(dim=-1)
    scales = (largest.clamp(min=_SMALLEST_RANGE) / _LARGEST_INT8)[..., None]  # a NaN stays one
    codes = (numbers / scales).round().to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), dim=-1)


def decode(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers [..., D] in `dtype`, the model's, that `rows` [..., row width] hold."""
    if rows.dtype != torch.int8:
        return rows if rows.dtype == dtype else rows.to(dtype)
    codes, scales = rows.split((rows.shape[-1] - _SCALE_BYTES, _SCALE_BYTES), dim=-1)
    # A copy is aligned, which a view need not be.
    scales = scales.clone(memory_format=torch.contiguous_format)
    return (codes.float() * scales.view(torch.float32)).to(dtype)


def write_rows(pages: torch.Tensor, slots: torch.Tensor, numbers: torch.Tensor) -> None:
    """Writes `numbers` [T, Hkv, D] into `slots` [T] of `pages` [N, S, Hkv, row width]."""
    rows, store = encode(numbers, pages.dtype), pages.flatten(0, 1)
    if pages.dtype == FP8:  # which torch cannot scatter
        rows, store = rows.view(torch.uint8), store.view(torch.uint8)
    store.index_copy_(0, slots, rows)
