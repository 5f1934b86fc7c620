"""Quantized weights: the numbers and scales of a matrix, for all names that checkpoints use.

`layouts.py` reads them from a checkpoint, `rounding.py` makes them from 16 bits. Shapes: O outputs,
I inputs, G groups of inputs that share a scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
INT8_LARGEST = 127
# The numbers of MXFP4 by their codes.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1_MAGNITUDES, *(-number for number in _E2M1_MAGNITUDES))
MXFP4_GROUP = 32  # inputs that share a scale
# With these every number is a normal one of bf16.
MXFP4_SCALES = range(2, 253)


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """W8A8: `scales[o] * values[o, i]`, for rows that are rounded to 8 bits, each by its own scale.

    Attributes:
        values: [O, I] int8.
        scales: [O] fp32.
        dtype: of the rows that it multiplies, and of their products.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.values.shape
        return outputs, inputs

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for weights that can be joined."""
        return (Int8Weight, self.shape[1], self.dtype)

    def part(self, outputs: slice) -> "Int8Weight":
        """The weight of some of the outputs."""
        return replace(self, values=self.values[outputs], scales=self.scales[outputs])

    def dequantized(self) -> torch.Tensor:
        """[O, I] fp32."""
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """FP8 W8A8: `scales[o, i // group_size] * values[o, i]`, for rows that are rounded to e4m3 too,
    with a scale for each group of a row.

    Attributes:
        values: [O, I] float8_e4m3fn, finite.
        scales: [O, G] fp32.
        group_size: inputs of a group; the last may have fewer.
        dtype: as in `Int8Weight`.
    """

    values: torch.Tensor
    scales: torch.Tensor
    group_size: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.values.shape
        return outputs, inputs

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @property
    def kind(self) -> tuple[object, ...]:
        return (Fp8Weight, self.shape[1], self.group_size, self.dtype)

    def part(self, outputs: slice) -> "Fp8Weight":
        return replace(self, values=self.values[outputs], scales=self.scales[outputs])

    def dequantized(self) -> torch.Tensor:
        return self.values.float() * _spread(self.scales, self.group_size, self.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """W4A16, or W4A8: `scales[o, g] * (number[o, p] - zeros[o, g])` at place p of group
    g = p // group_size.

    Attributes:
        packed: [O, I / 2] uint8: numbers from 0 to 15, that of the even place in the low half.
        scales: [O, G] fp32.
        zeros: [O, G] uint8, 0 to 15.
        group_size: places of a group; divides I.
        order: [I] int64, the input at each place; None where place p is input p.
        dtype: as in `Int8Weight`.
        rounds_rows: whether rows are rounded to 8 bits, each by its own scale (W4A8).
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_size: int
    order: torch.Tensor | None
    dtype: torch.dtype
    rounds_rows: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + self.zeros.nbytes

    @property
    def kind(self) -> tuple[object, ...]:
        order = None if self.order is None else tuple(self.order.tolist())
        return (Int4Weight, self.shape[1], self.group_size, order, self.dtype, self.rounds_rows)

    @property
    def numbers(self) -> torch.Tensor:
        """[O, I] uint8, 0 to 15."""
        return unpack_halves(self.packed)

    def part(self, outputs: slice) -> "Int4Weight":
        return replace(
            self,
            packed=self.packed[outputs],
            scales=self.scales[outputs],
            zeros=self.zeros[outputs],
        )

    def dequantized(self) -> torch.Tensor:
        """[O, I] fp32, by input."""
        scales, zeros = (
            _spread(numbers, self.group_size, self.shape[1])
            for numbers in (self.scales, self.zeros.float())
        )
        by_place = (self.numbers.float() - zeros) * scales
        if self.order is None:
            return by_place
        by_input = torch.empty_like(by_place)
        by_input[:, self.order] = by_place
        return by_input


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Weight:
    """MXFP4 (OCP Microscaling Formats 1.0): `E2M1[code[o, i]] * 2 ** (scales[o, i // 32] - 127)`,
    for rows of 16 bits, in which these numbers are exact.

    Attributes:
        packed: [O, I / 2] uint8: codes from 0 to 15, that of the even input in the low half.
        scales: [O, I / 32] uint8, from MXFP4_SCALES.
        dtype: as in `Int8Weight`.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes

    @property
    def kind(self) -> tuple[object, ...]:
        return (Mxfp4Weight, self.shape[1], self.dtype)

    @property
    def numbers(self) -> torch.Tensor:
        """The codes [O, I] uint8, 0 to 15."""
        return unpack_halves(self.packed)

    def part(self, outputs: slice) -> "Mxfp4Weight":
        return replace(self, packed=self.packed[outputs], scales=self.scales[outputs])

    def dequantized(self) -> torch.Tensor:
        powers = powers_of_two(self.scales)
        numbers = torch.tensor(E2M1, device=self.packed.device)[self.numbers.long()]
        return numbers * _spread(powers, MXFP4_GROUP, self.shape[1])


QuantizedWeight = Int8Weight | Fp8Weight | Int4Weight | Mxfp4Weight
Matrix = torch.Tensor | QuantizedWeight


def powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    """`2 ** (scales - 127)` in fp32 of integers from 1 to 254, exactly: the bits of an exponent."""
    return (scales.to(torch.int32) << 23).view(torch.float32)


def pack_halves(numbers: torch.Tensor) -> torch.Tensor:
    """`Int4Weight.packed` [O, I / 2] of numbers [O, I] from 0 to 15."""
    numbers = numbers.to(torch.uint8)
    return numbers[:, ::2] | numbers[:, 1::2] << 4


def unpack_halves(packed: torch.Tensor) -> torch.Tensor:
    """The numbers [O, I] of `pack_halves`."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def scale_rows(matrix: Matrix, factors: torch.Tensor) -> Matrix:
    """`matrix` [O, I] with each row multiplied by its factor [O], a power of two: exactly."""
    factors = factors[:, None]
    if isinstance(matrix, torch.Tensor):
        return matrix * factors.to(matrix)
    assert not isinstance(matrix, Mxfp4Weight), "only experts are, and none scales these"
    scales = matrix.scales
    factors = factors.to(scales)
    return replace(matrix, scales=scales * (factors if scales.dim() == 2 else factors[:, 0]))


def part_of(matrix: Matrix, outputs: slice) -> Matrix:
    """Some of the rows of `matrix`."""
    return matrix[outputs] if isinstance(matrix, torch.Tensor) else matrix.part(outputs)


def join(matrices: Sequence[Matrix]) -> Matrix | None:
    """The matrices one below the other as one; None if they are of several kinds."""
    if len(matrices) == 1:
        return matrices[0]
    plain = [matrix for matrix in matrices if isinstance(matrix, torch.Tensor)]
    if len(plain) == len(matrices):
        return torch.cat(plain)
    quantized = [matrix for matrix in matrices if not isinstance(matrix, torch.Tensor)]
    if plain or len({weight.kind for weight in quantized}) > 1:
        return None
    first = quantized[0]
    tensors: dict[str, Any] = {}
    for name in ("values", "packed", "scales", "zeros"):
        if hasattr(first, name):
            parts = [getattr(weight, name) for weight in quantized]
            # torch cannot join fp8, but bytes
            whole = torch.cat([part.view(torch.uint8) for part in parts])
            tensors[name] = whole.view(parts[0].dtype)
    return replace(first, **tensors)


def _spread(numbers: torch.Tensor, group_size: int, inputs: int) -> torch.Tensor:
    """[O, I] from the values of groups [O, G]."""
    return numbers.repeat_interleave(group_size, dim=1)[:, :inputs]
