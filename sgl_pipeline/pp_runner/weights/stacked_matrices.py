"""Reads the matrices of all experts of a layer where a checkpoint has them in one tensor: gpt-oss's
plain, inputs first, or in MXFP4, Qwen3.5's plain, outputs first. One expert's part is read after
the other, so that a stage never holds a stack beside its experts.

Shapes: E experts, O outputs, I inputs, G = I / 32 groups.
"""

from collections.abc import Iterator

import torch

from sgl_pipeline.errors import CheckpointError
from sgl_pipeline.pp_runner.weights.checkpoint import WeightSource
from sgl_pipeline.pp_runner.weights.layouts import round_matrix
from sgl_pipeline.pp_runner.weights.quantized_weights import (
    MXFP4_GROUP,
    MXFP4_SCALES,
    Matrix,
    Mxfp4Weight,
)
from sgl_pipeline.pp_runner.weights.schemes import Layout, Quantization, Scheme

# Looked through for zeros. So few that what is kept lies in memory without gaps.
_OUTPUTS_AT_ONCE = 64


def read_stacked_matrices(
    source: WeightSource,
    quantization: Quantization | None,
    module: str,
    shape: tuple[int, int, int],
) -> Iterator[Matrix]:
    """The matrix [O, I] of each expert of `module`, `shape` (E, O, I); a copy of its own.

    Raises CheckpointError as `source` does, and for a tensor that does not fit.
    """
    scheme = quantization.scheme_of(module) if quantization is not None else None
    layout = Layout.SIXTEEN_BITS if quantization is None else quantization.layout_of(module)
    if scheme is None or source.is_made_up or layout is Layout.SIXTEEN_BITS:
        num_experts, outputs, inputs = shape
        parts = source.read_parts(module, (num_experts, inputs, outputs))
        yield from _rounded(source, scheme, module, (plain.T.contiguous() for plain in parts))
        return
    if layout is not Layout.MXFP4:
        raise CheckpointError(
            f"{module}: experts in one tensor are read plain or in MXFP4, not in the layout "
            f"{layout.name}"
        )
    yield from _read_mxfp4(source, module, shape)


def read_plain_stack(
    source: WeightSource, scheme: Scheme | None, name: str, shape: tuple[int, int, int]
) -> Iterator[Matrix]:
    """The matrix [O, I] of each expert of the tensor `name`, `shape` (E, O, I), which has 16 bits:
    a copy of its own, in the scheme.

    Raises CheckpointError as `source` does.
    """
    return _rounded(source, scheme, name, source.read_parts(name, shape))


def _rounded(
    source: WeightSource, scheme: Scheme | None, name: str, matrices: Iterator[torch.Tensor]
) -> Iterator[Matrix]:
    """`matrices` of the tensor `name` in the scheme; updates the source's bytes."""
    if scheme is None:
        yield from matrices
        return
    num_bytes = 0
    for matrix in matrices:
        weight = round_matrix(source, name, matrix, scheme)
        del matrix  # before the next one needs memory
        num_bytes += weight.nbytes
        yield weight
    source.loaded[name] = num_bytes


def _read_mxfp4(source: WeightSource, module: str, shape: tuple[int, int, int]) -> Iterator[Matrix]:
    """The published layout: `blocks` [E, O, G, 16] have two codes in a byte, the even input's in
    its low half, `scales` [E, O, G] the exponents (transformers' integrations/mxfp4.py)."""
    num_experts, outputs, inputs = shape
    if inputs % MXFP4_GROUP:
        raise CheckpointError(
            f"{module} has {inputs} inputs, not a multiple of MXFP4's groups of {MXFP4_GROUP}"
        )
    groups = inputs // MXFP4_GROUP
    blocks = source.read_parts(
        f"{module}_blocks", (num_experts, outputs, groups, MXFP4_GROUP // 2), torch.uint8
    )
    scales = source.read_parts(f"{module}_scales", (num_experts, outputs, groups), torch.uint8)
    for own_blocks, own_scales in zip(blocks, scales, strict=True):
        for codes, their_scales in zip(
            own_blocks.split(_OUTPUTS_AT_ONCE), own_scales.split(_OUTPUTS_AT_ONCE), strict=True
        ):
            their_scales[(codes & 0x77 == 0).all(dim=2)] = 127  # of zeros alone
        if own_scales.min() < MXFP4_SCALES[0] or own_scales.max() > MXFP4_SCALES[-1]:
            raise CheckpointError(
                f"tensor {module}_scales holds a scale outside of {MXFP4_SCALES[0]} to "
                f"{MXFP4_SCALES[-1]}, with which numbers are not those of bf16"
            )
        yield Mxfp4Weight(own_blocks.flatten(1), own_scales, source.dtype)
