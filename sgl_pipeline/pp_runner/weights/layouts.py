"""Reads matrices as checkpoints store them: plain, or quantized in one of the published layouts.

It reads one matrix after the other, so that a stage never holds more than the matrices of one
product besides its own. Every tensor is checked: its name, type and shape, that scales are finite,
and that FP8 holds no NaN.

Shapes: O outputs, I inputs, G groups.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from sgl_pipeline.errors import CheckpointError
from sgl_pipeline.pp_runner.weights.checkpoint import WeightSource
from sgl_pipeline.pp_runner.weights.quantized_weights import (
    FP8,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Matrix,
    QuantizedWeight,
    pack_halves,
)
from sgl_pipeline.pp_runner.weights.schemes import (
    Fp8Scheme,
    Int4Scheme,
    Int8Scheme,
    Layout,
    Mxfp4Scheme,
    Quantization,
    Scheme,
)

_PER_WORD = 8  # numbers of 4 bits in an int32
# Where AWQ puts the outputs of eight neighbors (AutoAWQ's utils/packing_utils.py).
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

Shape = tuple[int, int]


def read_matrix(
    source: WeightSource, quantization: Quantization | None, module: str, shape: Shape
) -> Matrix:
    """The matrix of `module` [O, I] from `source`, quantized if it should be.

    Raises CheckpointError as `source` does, and for a tensor that does not fit.
    """
    scheme = quantization.scheme_of(module) if quantization is not None else None
    if quantization is None or scheme is None:
        return source.read(f"{module}.weight", shape)
    _check_shape(module, shape, scheme)
    layout = quantization.layout_of(module)
    if source.is_made_up or layout is Layout.SIXTEEN_BITS:
        return round_matrix(
            source, f"{module}.weight", source.read(f"{module}.weight", shape), scheme
        )
    if isinstance(scheme, Mxfp4Scheme):
        raise CheckpointError(f"{module} is in MXFP4, which is read of gpt-oss's experts alone")
    if isinstance(scheme, Int4Scheme):
        weight = _READ_INT4[layout](source, module, shape, scheme)
        return replace(weight, rounds_rows=scheme.rounds_rows)
    return _read_eight_bits(source, module, shape, scheme, layout)


def round_matrix(
    source: WeightSource, name: str, matrix: torch.Tensor, scheme: Scheme
) -> QuantizedWeight:
    """`matrix`, which `source` returned for `name`, in the scheme; updates the source's bytes."""
    weight = scheme.quantize(matrix)
    if not weight.scales.is_meta and not torch.isfinite(weight.scales).all():
        raise CheckpointError(f"tensor {name} holds a number that is not finite")
    source.loaded[name] = weight.nbytes
    return weight


def _check_shape(module: str, shape: Shape, scheme: Scheme) -> None:
    if not isinstance(scheme, Int4Scheme):
        return
    if shape[1] % (scheme.group_size or _PER_WORD) or shape[1] % _PER_WORD:
        raise CheckpointError(
            f"{module} has {shape[1]} inputs, not a multiple of its groups of "
            f"{scheme.group_size or _PER_WORD}"
        )


def _read_eight_bits(
    source: WeightSource, module: str, shape: Shape, scheme: Int8Scheme | Fp8Scheme, layout: Layout
) -> QuantizedWeight:
    outputs, inputs = shape
    name = f"{module}.weight"
    if isinstance(scheme, Int8Scheme):
        values = source.read_as(name, shape, torch.int8)
        scales = _read_scales(source, f"{module}.weight_scale", (outputs, 1))
        return Int8Weight(values, scales.flatten(), source.dtype)
    values = source.read_as(name, shape, FP8)
    if (values.view(torch.uint8) & 0x7F == 0x7F).any():
        raise CheckpointError(f"tensor {name} holds a number that is not finite")
    rows, columns = (size or whole for size, whole in zip(scheme.block, shape, strict=True))
    is_inverse = layout is Layout.FP8 and scheme.block[1] is not None
    scales = _read_scales(
        source,
        f"{module}.weight_scale" + "_inv" * is_inverse,
        (-(-outputs // rows), -(-inputs // columns)),
    )
    scales = scales.repeat_interleave(rows, dim=0)[:outputs].contiguous()
    return Fp8Weight(values, scales, columns, source.dtype)


def _read_packed(source: WeightSource, module: str, shape: Shape, scheme: Int4Scheme) -> Int4Weight:
    """compressed-tensors' pack-quantized (compressors/pack_quantized): eight neighbors in a word,
    the first lowest, and 8 for zero."""
    outputs, inputs = shape
    num_groups = inputs // (scheme.group_size or inputs)
    said = source.read_as(f"{module}.weight_shape", (2,), torch.int64).tolist()
    if tuple(said) != shape:
        raise CheckpointError(
            f"tensor {module}.weight_shape says {said}, config.json asks for {list(shape)}"
        )
    words = source.read_as(f"{module}.weight_packed", (outputs, inputs // _PER_WORD), torch.int32)
    scales = _read_scales(source, f"{module}.weight_scale", (outputs, num_groups))
    zeros = torch.full_like(scales, 8, dtype=torch.uint8)
    if not scheme.is_symmetric:
        num_words = -(-outputs // _PER_WORD)
        packed = source.read_as(f"{module}.weight_zero_point", (num_words, num_groups), torch.int32)
        zeros = _halves(packed.T).T[:outputs].contiguous()
    groups = None
    if scheme.has_order:
        groups = source.read_as(f"{module}.weight_g_idx", (inputs,), torch.int32)
    return _int4(source, f"{module}.weight_g_idx", _halves(words), scales, zeros, groups)


def _read_gptq(
    source: WeightSource, module: str, shape: Shape, scheme: Int4Scheme, added_to_zeros: int = 1
) -> Int4Weight:
    """GPTQ's (AutoGPTQ's nn_modules/qlinear): eight inputs of an output in a word, zero points less
    one and eight outputs in a word."""
    outputs, inputs = shape
    num_groups = inputs // (scheme.group_size or inputs)
    words = source.read_as(f"{module}.qweight", (inputs // _PER_WORD, outputs), torch.int32)
    zeros = source.read_as(f"{module}.qzeros", (num_groups, outputs // _PER_WORD), torch.int32)
    scales = _read_scales(source, f"{module}.scales", (num_groups, outputs))
    zeros = (_halves(zeros) + added_to_zeros & 15).T.contiguous()
    groups = None
    if scheme.has_order or source.has(f"{module}.g_idx"):
        groups = source.read_as(f"{module}.g_idx", (inputs,), torch.int32)
    numbers = _halves(words.T)
    return _int4(source, f"{module}.g_idx", numbers, scales.T.contiguous(), zeros, groups)


def _read_gptq_v2(
    source: WeightSource, module: str, shape: Shape, scheme: Int4Scheme
) -> Int4Weight:
    """The same with unchanged zero points."""
    return _read_gptq(source, module, shape, scheme, added_to_zeros=0)


def _read_awq(source: WeightSource, module: str, shape: Shape, scheme: Int4Scheme) -> Int4Weight:
    """AWQ's for its `gemm` kernel (AutoAWQ's modules/linear/gemm.py): eight outputs in a word."""
    outputs, inputs = shape
    num_groups = inputs // (scheme.group_size or inputs)
    words = source.read_as(f"{module}.qweight", (inputs, outputs // _PER_WORD), torch.int32)
    zeros = source.read_as(f"{module}.qzeros", (num_groups, outputs // _PER_WORD), torch.int32)
    scales = _read_scales(source, f"{module}.scales", (num_groups, outputs)).T.contiguous()
    numbers, zeros = (_halves(packed, _AWQ_ORDER).T for packed in (words, zeros))
    return _int4(source, "", numbers, scales, zeros.contiguous(), None)


_READ_INT4: dict[Layout, Callable[[WeightSource, str, Shape, Int4Scheme], Int4Weight]] = {
    Layout.COMPRESSED_TENSORS: _read_packed,
    Layout.GPTQ: _read_gptq,
    Layout.GPTQ_V2: _read_gptq_v2,
    Layout.AWQ: _read_awq,
}


def _read_scales(source: WeightSource, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Scales in fp32; dimensions of 1 may be missing in the file."""
    scales = source.read_as(name, shape, torch.float32)
    if not torch.isfinite(scales).all():
        raise CheckpointError(f"tensor {name} holds a scale that is not finite")
    return scales


def _halves(words: torch.Tensor, order: tuple[int, ...] = tuple(range(_PER_WORD))) -> torch.Tensor:
    """The numbers [R, 8 C] uint8 of words [R, C] int32; the k-th of a word lies at `order[k]`."""
    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32, device=words.device)
    return torch.cat(
        [(part[..., None] >> shifts & 15).to(torch.uint8).flatten(1) for part in words.split(256)]
    )


def _int4(
    source: WeightSource,
    order_name: str,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    groups: torch.Tensor | None,
) -> Int4Weight:
    """Puts inputs that share a scale beside each other.

    Args:
        numbers: [O, I] uint8.
        groups: [I], the group of each input; None where they are in order.
    """
    inputs, num_groups = numbers.shape[1], scales.shape[1]
    group_size, order = inputs // num_groups, None
    if groups is not None:
        by_place = groups.argsort(stable=True)
        places = torch.arange(inputs, device=groups.device)
        expected = places // group_size
        if not torch.equal(groups[by_place].long(), expected):
            raise CheckpointError(
                f"tensor {order_name} does not give each of {num_groups} groups {group_size} inputs"
            )
        if not torch.equal(by_place, places):
            order, numbers = by_place, numbers[:, by_place]
    return Int4Weight(pack_halves(numbers), scales, zeros, group_size, order, source.dtype)
