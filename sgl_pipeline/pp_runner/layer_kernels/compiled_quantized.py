"""Matrix products with quantized weights on CPU cores, compiled from `cpu_kernels/`.

They need special instructions of the CPU. This module hands raw pointers to C++, so it must never
pass a tensor on whose shape, type or layout was not checked. Never keeps two copies of a weight.
"""

from dataclasses import dataclass

import torch

from sgl_pipeline.pp_runner.cpu_kernels.library import CpuKernels
from sgl_pipeline.pp_runner.layer_kernels.weight_packing import (
    beside_groups,
    in_byte_pairs,
    in_half_bytes,
    in_lines,
    in_quads,
)
from sgl_pipeline.pp_runner.weights.quantized_weights import (
    MXFP4_GROUP,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Mxfp4Weight,
    QuantizedWeight,
)

_TILE_INPUTS = 32  # of a tile of bf16, and of a step in int4_products.cpp


class _QuantizedLinear:
    """The common part of the products: their shape, their bias, and the check of rows."""

    def __init__(
        self,
        kernels: CpuKernels,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        is_gated: bool,
    ) -> None:
        outputs, self.in_features = weight.shape
        assert weight.dtype == torch.bfloat16 and weight.scales.device.type == "cpu"
        assert outputs % (2 if is_gated else 1) == 0
        assert bias is None or (bias.shape == (outputs,) and bias.dtype == weight.dtype)
        self.out_features = outputs // 2 if is_gated else outputs
        self._kernels = kernels
        self._is_gated = is_gated
        self._bias = None if bias is None else bias.contiguous()
        self._order = weight.order if isinstance(weight, Int4Weight) else None
        if self._order is not None:
            assert self._order.shape == (self.in_features,) and self._order.dtype == torch.int64
            assert self._order.is_contiguous()
            assert int(self._order.min()) >= 0 and int(self._order.max()) < self.in_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, out] for `x` [T, in]."""
        x = x.contiguous()
        assert x.dim() == 2 and x.shape[1] == self.in_features
        assert x.dtype == torch.bfloat16 and x.device.type == "cpu"
        if self._order is not None:
            x = self._reordered(x, self._order)
        y = x.new_empty(len(x), self.out_features)
        self._multiply(x, y)
        return y

    def _multiply(self, x: torch.Tensor, y: torch.Tensor) -> None:
        raise NotImplementedError

    def _reordered(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        reordered = torch.empty_like(x)
        self._kernels.reorder(
            num_rows=len(x),
            size=self.in_features,
            rows=x,
            order=order,
            reordered=reordered,
            num_threads=torch.get_num_threads(),
        )
        return reordered


class CompiledInt8Linear(_QuantizedLinear):
    """`x @ weight.T + bias` for bf16 rows that are rounded to 8 bits; the result has the bits of
    `TorchQuantizedLinear`; gated, it is close to `LayerKernels.gated_linear`. At 1, 4, 16, 64 and
    256 rows it takes 0.51, 0.55, 0.55, 0.55 and 0.55 of the time of bf16 (`CompiledLinear`): one
    core of an EPYC with AVX-512 VNNI, the matrices of the 0.27b preset, by
    `benchmark/kernels/kernels_cpu.py --quantized`.

    Args:
        kernels: of a library that `has_int8_products`.
        weight: [out, in], gated [2 * out, in], for bf16 rows.
        bias: [out], gated [2 * out], in bf16, or None.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        weight: Int8Weight,
        bias: torch.Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> None:
        assert kernels.has_int8_products
        super().__init__(kernels, weight, bias, is_gated)
        self._scales = weight.scales.contiguous()
        sums = weight.values.sum(dim=1, dtype=torch.int32)
        self._corrections = 128 * sums  # for VNNI, which wants rows unsigned
        self._packed = in_lines(weight.values, 4, is_gated)

    def _multiply(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._kernels.int8_product(
            num_rows=len(x),
            inputs=self.in_features,
            outputs=self.out_features,
            gated=self._is_gated,
            rows=x,
            weight=self._packed,
            scales=self._scales,
            corrections=self._corrections,
            bias=self._bias,
            out=y,
            num_threads=torch.get_num_threads(),
        )


class CompiledInt4Linear(_QuantizedLinear):
    """The same for weights of 4 bits, in groups, and rows that are rounded to 8 bits.

    Sums over a group (of more than 512 inputs: over parts of it) are exact, and added up in fp32; a
    row's result is bitwise the same in any microbatch.

    Args:
        kernels, bias, is_gated: as above.
        weight: one that `rounds_rows`.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        weight: Int4Weight,
        bias: torch.Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> None:
        assert kernels.has_int8_products and weight.rounds_rows
        super().__init__(kernels, weight, bias, is_gated)
        self._groups = groups = _Groups.of(
            weight.shape[1], weight.group_size, kernels.most_int4_tiles
        )
        self._scales = groups.beside(weight.scales, is_gated)
        self._zeros = groups.beside(weight.zeros, is_gated)
        self._packed = in_half_bytes(weight.numbers, is_gated)

    def _multiply(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._kernels.int4_product(
            num_rows=len(x),
            inputs=self.in_features,
            outputs=self.out_features,
            gated=self._is_gated,
            group_steps=self._groups.part_tiles,
            rows=x,
            weight=self._packed,
            scales=self._scales,
            zeros=self._zeros,
            bias=self._bias,
            out=y,
            num_threads=torch.get_num_threads(),
        )


class CompiledExpandedLinear(_QuantizedLinear):
    """The same for weights of 4 bits, and for FP8, which become bf16 on the way into the product,
    or fp32 without bf16 instructions.

    Sums are fp32 and rounded once; a row's result is bitwise the same in any microbatch.
    Measured so, with bf16 instructions, 4 bits take 0.63, 0.70, 1.06, 1.08 and 1.01 of the time of
    bf16, FP8 0.91, 1.00, 1.30, 1.11 and 1.06: they save memory, and time where there are few rows.

    Args:
        kernels: of a library that `has_products`.
        weight, bias, is_gated: as above.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        weight: Int4Weight | Fp8Weight,
        bias: torch.Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> None:
        assert kernels.has_products
        super().__init__(kernels, weight, bias, is_gated)
        in_bf16 = kernels.has_bf16_instructions
        self._groups = groups = _Groups.of(
            weight.shape[1], weight.group_size, kernels.most_expanded_tiles
        )
        self._scales = groups.beside(weight.scales, is_gated)
        self._zeros: torch.Tensor | None = None
        self._is_fp8 = isinstance(weight, Fp8Weight)
        if isinstance(weight, Fp8Weight):
            self._packed = in_lines(weight.values, 2, is_gated)
        else:
            in_order = in_quads if in_bf16 else in_byte_pairs
            self._packed = in_order(weight.numbers, is_gated)
            self._zeros = groups.beside(weight.zeros, is_gated)

    def _multiply(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._kernels.expanded_product(
            is_fp8=self._is_fp8,
            num_rows=len(x),
            inputs=self.in_features,
            outputs=self.out_features,
            gated=self._is_gated,
            group_tiles=self._groups.part_tiles,
            row_group_tiles=self._groups.tiles,
            rows=x,
            weight=self._packed,
            scales=self._scales,
            zeros=self._zeros,
            bias=self._bias,
            out=y,
            num_threads=torch.get_num_threads(),
        )


class CompiledMxfp4Linear(_QuantizedLinear):
    """The same for weights in MXFP4: a product of bf16 with what they stand for. With bf16
    instructions it has the bits of one. Without, small numbers of a row are rounded beside the
    greatest of their group (`avx2_mxfp4_products.cpp`).

    Args:
        kernels: of a library that `has_products`.
        weight, bias, is_gated: as above.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        weight: Mxfp4Weight,
        bias: torch.Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> None:
        assert kernels.has_products and MXFP4_GROUP == _TILE_INPUTS
        super().__init__(kernels, weight, bias, is_gated)
        in_order = in_quads if kernels.has_bf16_instructions else in_byte_pairs
        self._packed = in_order(weight.numbers, is_gated)
        self._exponents = beside_groups(weight.scales, 1, weight.scales.shape[1], is_gated)

    def _multiply(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._kernels.mxfp4_product(
            num_rows=len(x),
            inputs=self.in_features,
            outputs=self.out_features,
            gated=self._is_gated,
            rows=x,
            weight=self._packed,
            exponents=self._exponents,
            bias=self._bias,
            out=y,
            num_threads=torch.get_num_threads(),
        )


@dataclass(frozen=True, slots=True)
class _Groups:
    """The order in which products go through a weight's inputs: groups of `tiles`, in `num_parts`
    parts of `part_tiles`, at most `most_tiles`."""

    tiles: int
    part_tiles: int
    num_parts: int

    @staticmethod
    def of(inputs: int, group_size: int, most_tiles: int) -> "_Groups":
        all_tiles = -(-inputs // _TILE_INPUTS)
        is_whole_row = group_size >= inputs
        assert is_whole_row or group_size % _TILE_INPUTS == 0
        tiles = all_tiles if is_whole_row else group_size // _TILE_INPUTS
        part_tiles = _tiles_at_once(tiles, most_tiles, is_whole_row)
        return _Groups(tiles, part_tiles, -(-all_tiles // part_tiles))

    def beside(self, numbers: torch.Tensor, is_gated: bool) -> torch.Tensor:
        """The scales or zero points [O, G] as the products read them, one for each part."""
        repeats = -(-self.tiles // self.part_tiles)
        return beside_groups(numbers, repeats, self.num_parts, is_gated)


def _tiles_at_once(group_tiles: int, most_tiles: int, is_last: bool) -> int:
    """Tiles of a part of a group: parts are of one size, except the last of the last group."""
    if is_last:
        return min(group_tiles, most_tiles)
    return max(tiles for tiles in range(1, most_tiles + 1) if group_tiles % tiles == 0)
