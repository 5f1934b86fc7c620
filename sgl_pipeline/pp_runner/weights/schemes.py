"""Describes how a model's matrices are quantized: which of them, to what, and their storage.

A part of the `ModelSpec`. Reads no tensor.
"""

import re
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch

from sgl_pipeline.pp_runner.weights.quantized_weights import QuantizedWeight
from sgl_pipeline.pp_runner.weights.rounding import to_fp8, to_int4, to_int8, to_mxfp4

GPTQ_LEFT_OUT = "-:"  # begins a pattern of GPTQModel for matrices of 16 bits


@dataclass(frozen=True, slots=True)
class Int8Scheme:
    """W8A8: a scale for each output, and one for each row when it comes."""

    def quantize(self, matrix: torch.Tensor) -> QuantizedWeight:
        """The weight nearest to `matrix` [O, I], for rows in its dtype."""
        return to_int8(matrix)


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """FP8 W8A8. A scale covers `block` (outputs, inputs) of the weight, and in a row as many
    inputs; None stands for all."""

    block: tuple[int | None, int | None]

    def quantize(self, matrix: torch.Tensor) -> QuantizedWeight:
        return to_fp8(matrix, self.block[1] or matrix.shape[1])


@dataclass(frozen=True, slots=True)
class Int4Scheme:
    """W4A16: a scale for `group_size` inputs of an output (None: for all), and a zero point where
    not `is_symmetric`. `has_order`: groups are of inputs that need not be neighbors. `rounds_rows`:
    rows are rounded to 8 bits, with a scale for each when it comes (W4A8)."""

    group_size: int | None
    is_symmetric: bool
    has_order: bool = False
    rounds_rows: bool = False

    def quantize(self, matrix: torch.Tensor) -> QuantizedWeight:
        weight = to_int4(matrix, self.group_size or matrix.shape[1])
        return replace(weight, rounds_rows=self.rounds_rows)


@dataclass(frozen=True, slots=True)
class Mxfp4Scheme:
    """MXFP4: numbers of 4 bits times a power of two for each 32 inputs; rows keep 16 bits."""

    def quantize(self, matrix: torch.Tensor) -> QuantizedWeight:
        return to_mxfp4(matrix)


Scheme = Int8Scheme | Fp8Scheme | Int4Scheme | Mxfp4Scheme


class Layout(Enum):
    """The checkpoint's storage of quantized matrices."""

    SIXTEEN_BITS = auto()  # not stored; rounded when they are loaded
    COMPRESSED_TENSORS = auto()
    FP8 = auto()
    GPTQ = auto()  # zero points are stored less one
    GPTQ_V2 = auto()
    AWQ = auto()
    MXFP4 = auto()  # blocks and scales of all experts of a layer together


@dataclass(frozen=True, slots=True)
class Names:
    """Some of a model's matrices, by module names: `is_among` for one of `entries`."""

    entries: tuple[str, ...]
    is_among: Callable[[str, str], bool]

    def __contains__(self, module: object) -> bool:
        assert isinstance(module, str)
        return any(self.is_among(module, entry) for entry in self.entries)


def matches_target(module: str, target: str) -> bool:
    """As compressed-tensors matches (`match_name`, `match_class` in utils/match.py)."""
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target in ("Linear", module)


def is_inside(module: str, name: str) -> bool:
    """True if the parts of `name` are among those of the module's, one after the other: `lm_head`,
    `model.layers.0`, `layers.0.mlp` (upstream's `_module_path_match` in quantization/utils.py)."""
    return f".{name}." in f".{module}."


@dataclass(frozen=True, slots=True)
class GptqLeftOut:
    """The matrices of a GPTQ checkpoint that have 16 bits: those inside one of `names`, and those
    of which the first pattern in `dynamic` that matches begins with "-:", as in GPTQModel's
    `dynamic_get` (quantization/config.py)."""

    names: tuple[str, ...]
    dynamic: tuple[str, ...]

    def __contains__(self, module: object) -> bool:
        assert isinstance(module, str)
        first = next((one for one in self.dynamic if gptq_pattern(one).match(module)), "")
        is_named = any(is_inside(module, name) for name in self.names)
        return is_named or first.startswith(GPTQ_LEFT_OUT)


def gptq_pattern(entry: str) -> re.Pattern[str]:
    """The pattern of an entry of GPTQModel's `dynamic`, which begins with "-:", "+:" or neither.

    Raises re.error.
    """
    return re.compile(entry[2:] if entry.startswith((GPTQ_LEFT_OUT, "+:")) else entry)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantized matrices and their formats; `method` is spelled as in the config or
    `--quantization`.

    With `has_kv_scales` the checkpoint has a scale for each layer's keys, and one for its values,
    by which they become FP8 (`kv_scales.py`). `rounded_head` names the head if it has 16 bits in
    the checkpoint and is rounded to int8 when it is loaded.
    """

    method: str
    layout: Layout
    groups: tuple[tuple[Names, Scheme], ...]
    ignored: Container[str]
    has_kv_scales: bool = False
    rounded_head: str | None = None

    def layout_of(self, module: str) -> Layout:
        """The checkpoint's storage of the matrix `module`, which has a scheme."""
        return Layout.SIXTEEN_BITS if module == self.rounded_head else self.layout

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of the matrix `module` (without `.weight`); None if it has 16 bits."""
        if module == self.rounded_head:
            return Int8Scheme()
        if module in self.ignored:
            return None
        return next((scheme for names, scheme in self.groups if module in names), None)
