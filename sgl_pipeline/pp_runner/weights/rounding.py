"""Rounds matrices of 16 or 32 bits to the nearest quantized ones.

Matrices are rounded some rows at a time, where they are, so that no whole copy in fp32 is ever
made.
"""

from collections.abc import Iterator

import torch

from sgl_pipeline.pp_runner.weights.quantized_weights import (
    E2M1,
    FP8,
    FP8_LARGEST,
    INT8_LARGEST,
    MXFP4_GROUP,
    MXFP4_SCALES,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    pack_halves,
    powers_of_two,
)

_NUMBERS_AT_ONCE = 2**17


def to_int8(matrix: torch.Tensor) -> Int8Weight:
    """Rounds with a scale for each output, symmetric, ties to even."""
    values = torch.empty_like(matrix, dtype=torch.int8)
    scales = matrix.new_empty(len(matrix), dtype=torch.float32)
    for part, rows in _parts(matrix):
        scales[part] = _or_one(rows.abs().amax(dim=1)) / INT8_LARGEST
        values[part] = (rows / scales[part, None]).round().to(torch.int8)
    return Int8Weight(values, scales, matrix.dtype)


def to_fp8(matrix: torch.Tensor, group_size: int) -> Fp8Weight:
    """Rounds with a scale for each output and group of inputs."""
    outputs, inputs = matrix.shape
    values = torch.empty_like(matrix, dtype=FP8)
    scales = matrix.new_empty(outputs, -(-inputs // group_size), dtype=torch.float32)
    for part, rows in _parts(matrix):
        for group, columns in enumerate(rows.split(group_size, dim=1)):
            scales[part, group] = _or_one(columns.abs().amax(dim=1)) / FP8_LARGEST
            start = group * group_size
            values[part, start : start + group_size] = (columns / scales[part, group, None]).to(FP8)
    return Fp8Weight(values, scales, group_size, matrix.dtype)


def to_int4(matrix: torch.Tensor, group_size: int) -> Int4Weight:
    """Rounds with a scale for each output and group of inputs, symmetric about 8: from -7 to 7."""
    outputs, inputs = matrix.shape
    packed = matrix.new_empty(outputs, inputs // 2, dtype=torch.uint8)
    scales = matrix.new_empty(outputs, inputs // group_size, dtype=torch.float32)
    for part, rows in _parts(matrix):
        groups = rows.unflatten(1, (-1, group_size))
        scales[part] = _or_one(groups.abs().amax(dim=2)) / 7
        numbers = (groups / scales[part, :, None]).round() + 8
        packed[part] = pack_halves(numbers.flatten(1))
    zeros = torch.full_like(scales, 8, dtype=torch.uint8)
    return Int4Weight(packed, scales, zeros, group_size, None, matrix.dtype)


def to_mxfp4(matrix: torch.Tensor) -> Mxfp4Weight:
    """Rounds with the power of two, for each group of 32 inputs, that brings the largest into
    e2m1's highest binade; larger ones become its largest (OCP Microscaling Formats 1.0, 6.3)."""
    outputs, inputs = matrix.shape
    packed = matrix.new_empty(outputs, inputs // 2, dtype=torch.uint8)
    scales = matrix.new_empty(outputs, inputs // MXFP4_GROUP, dtype=torch.uint8)
    magnitudes = matrix.new_tensor(E2M1[:8], dtype=torch.float32)
    # A number between two becomes the nearer one, and in the middle that of the even code.
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    for part, rows in _parts(matrix):
        groups = rows.unflatten(1, (-1, MXFP4_GROUP))
        largest = _or_one(groups.abs().amax(dim=2))
        exponents = (largest.view(torch.int32) >> 23) - 2
        scales[part] = exponents.clamp(MXFP4_SCALES[0], MXFP4_SCALES[-1]).to(torch.uint8)
        scaled = (groups / powers_of_two(scales[part])[..., None]).flatten(1)
        below = torch.searchsorted(middles, scaled.abs())
        above = torch.searchsorted(middles, scaled.abs(), right=True)
        codes = torch.where(below % 2 == 0, below, above)
        packed[part] = pack_halves(codes + 8 * (scaled < 0))
    return Mxfp4Weight(packed, scales, matrix.dtype)


def _parts(matrix: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows in fp32, some at a time; all at once where they take no memory."""
    rows_at_once = max(1, _NUMBERS_AT_ONCE // matrix.shape[1])
    if matrix.is_meta:
        rows_at_once = len(matrix)
    for start in range(0, len(matrix), rows_at_once):
        part = slice(start, start + rows_at_once)
        yield part, matrix[part].float()


def _or_one(largest: torch.Tensor) -> torch.Tensor:
    """The divisor of all-zero rows does not matter; a NaN stays one."""
    return torch.where(largest == 0, 1.0, largest)
