"""Rounding to 8 bits on a GPU, one kernel for each call, in Triton.

The only file that imports triton. The codes and scales have the bits of `torch_quantized.py` and
`kv_format.py`, which tests hold by Triton's interpreter on a CPU. e4m3 is made by arithmetic on
bits: that interpreter rounds differently, and cards before 8.9 have no instruction for it. Compiled
for cards in the tests.

Types of a kernel's arguments are quoted, because Triton's compiler reads annotations too. A
multiplication and an addition are never one instruction here (`FUSES`): a product that was not
rounded would give other codes.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from sgl_pipeline.pp_runner.base.kv_format import FP8
from sgl_pipeline.pp_runner.weights.quantized_weights import FP8_LARGEST, INT8_LARGEST

Pages = tuple[torch.Tensor, torch.Tensor]

FUSES = False
_MOST_AT_ONCE = 4096  # numbers of a row
_NUMBERS_PER_WARP = 512


@triton.jit
def _magnitude(numbers: "Any") -> "Any":
    """The bits of |number| as int32, which are in the order of the numbers, NaN above all."""
    return numbers.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _e4m3(numbers: "Any") -> "Any":
    """The codes (int32) of the nearest numbers of the format, ties to even, 448 for larger ones."""
    sign = (numbers.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = _magnitude(numbers)
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, 0x43E00000)  # 448
    even = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the codes count in steps of 2^-9, the steps of fp32 numbers from 2^14 on.
    steps = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    codes = tl.where(magnitude < 0x3C800000, steps - 0x46800000, even)
    return tl.where(is_nan, 0x7F, codes) | sign


@triton.jit
def _int8(numbers: "Any") -> "Any":
    """The nearest of -127 to 127 (int32), ties to even: fp32 counts in ones from 2^23 on."""
    return (numbers + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit(do_not_specialize=["num_rows"])
def round_groups(
    x: "Any",
    values: "Any",
    scales: "Any",
    num_rows: "Any",
    inputs: "Any",
    row_stride: "Any",
    group_size: "Any",
    LARGEST: tl.constexpr,
    IS_INT8: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (r, g): group g of row r; rows from `num_rows` on are zeros. Scales by columns."""
    row, group = tl.program_id(0), tl.program_id(1)
    first = group * group_size
    # Of rows that only fill up, nothing is read.
    end = tl.where(row < num_rows, tl.minimum(first + group_size, inputs), first)
    row_of_x = x + row.to(tl.int64) * row_stride
    peaks = tl.zeros([BLOCK], tl.int32)
    for start in range(0, group_size, BLOCK):
        places = first + start + tl.arange(0, BLOCK)
        numbers = tl.load(row_of_x + places, mask=places < end, other=0.0)
        peaks = tl.maximum(peaks, _magnitude(numbers))
    largest = tl.max(peaks, axis=0).to(tl.float32, bitcast=True)
    # 2^-100, the smallest row of `torch_quantized.py`.
    factor = tl.where(largest > 7.888609052210118e-31, tl.div_rn(LARGEST, largest), 0.0)
    tl.store(scales + group * tl.num_programs(0) + row, tl.div_rn(largest, LARGEST))
    row_of_values = values + row.to(tl.int64) * inputs
    for start in range(0, group_size, BLOCK):
        places = first + start + tl.arange(0, BLOCK)
        numbers = tl.load(row_of_x + places, mask=places < end, other=0.0).to(tl.float32) * factor
        codes = _int8(numbers) if IS_INT8 else _e4m3(numbers)
        is_own = places < tl.minimum(first + group_size, inputs)
        tl.store(row_of_values + places, codes.to(values.dtype.element_ty), mask=is_own)


@triton.jit
def append_e4m3(
    key: "Any",
    value: "Any",
    key_pages: "Any",
    value_pages: "Any",
    slots: "Any",
    key_stride: "Any",
    value_stride: "Any",
    width: "Any",
    BLOCK: tl.constexpr,
) -> None:
    """Program t: the keys and values of row t, `width` numbers each, to its slot."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    is_own = places < width
    slot = tl.load(slots + row) * width + places
    keys = tl.load(key + row * key_stride + places, mask=is_own, other=0.0)
    tl.store(key_pages + slot, _e4m3(keys.to(tl.float32)).to(tl.uint8), mask=is_own)
    values = tl.load(value + row * value_stride + places, mask=is_own, other=0.0)
    tl.store(value_pages + slot, _e4m3(values.to(tl.float32)).to(tl.uint8), mask=is_own)


class TritonRowRounding:
    """The `RowRounding` of a GPU."""

    def to_fp8(
        self, x: torch.Tensor, group_size: int, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = _round(x, group_size, num_rows, torch.uint8, FP8_LARGEST)
        return values.view(FP8), scales

    def to_int8(self, x: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = _round(x, x.shape[1], num_rows, torch.int8, INT8_LARGEST)
        return values, scales[:, 0]

    def append_fp8(
        self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, pages: Pages
    ) -> None:
        num_heads, head_dim = key.shape[1:]
        assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1)
        assert all(of_kind.is_contiguous() and of_kind.dtype == FP8 for of_kind in pages)
        width = num_heads * head_dim
        append_e4m3[(len(slots),)](
            key,
            value,
            *(of_kind.view(torch.uint8) for of_kind in pages),
            slots,
            key.stride(0),
            value.stride(0),
            width,
            BLOCK=triton.next_power_of_2(width),
            enable_fp_fusion=FUSES,
        )


def _round(
    x: torch.Tensor, group_size: int, num_rows: int, dtype: torch.dtype, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`values` [num_rows, in] of `dtype` and `scales` [num_rows, G] by columns."""
    assert x.stride(1) == 1
    inputs = x.shape[1]
    num_groups = triton.cdiv(inputs, group_size)
    values = torch.empty(num_rows, inputs, dtype=dtype, device=x.device)
    scales = torch.empty(num_groups, num_rows, dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(group_size), _MOST_AT_ONCE)
    round_groups[(num_rows, num_groups)](
        x,
        values,
        scales,
        len(x),
        inputs,
        x.stride(0),
        group_size,
        LARGEST=float(largest),
        IS_INT8=dtype == torch.int8,
        BLOCK=block,
        num_warps=max(1, min(8, block // _NUMBERS_PER_WARP)),
        enable_fp_fusion=FUSES,
    )
    return values, scales.t()
