"""A GGUF file's header: its metadata, and where its tensors lie.

The parser is that of the `gguf` package. It trusts a file, so here each of its reads is held to the
file's end, and their number to what real vocabularies need: a length in the header that is a lie
must not fill the memory.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, dequantize
from gguf.constants import GGML_QUANT_SIZES

from sgl_pipeline.errors import CheckpointError, UnsupportedModelError

# A model of 20,000 tensors (many experts, each apart) has 130,000.
_MOST_PARTS = 2_000_000
# Longer arrays are of the vocabulary.
_MOST_ENTRIES = 4096
_ARRAY_HEAD, _LENGTH = struct.Struct("<IQ"), struct.Struct("<Q")
# What reading a file that is not GGUF may raise, there or in numpy.
_READING_ERRORS = (
    *(ValueError, KeyError, IndexError, TypeError, OverflowError),
    *(RecursionError, MemoryError, OSError, struct.error),
)
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`shape` with rows first, as torch has it; `offset` in bytes from the start of the file."""

    ggml_type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """`metadata` has no arrays of the vocabulary. `rope_factors` are those by which the
    frequencies of the rotary embedding are divided, None where the file has none."""

    path: Path
    size: int
    mtime_ns: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    rope_factors: tuple[float, ...] | None

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


class _BoundedReader(GGUFReader):
    """Raises ValueError or struct.error for what lies beyond the file's end, and for too many
    parts; passes over arrays of the vocabulary, of which the parser would make as many objects."""

    data: Any  # np.memmap, a buffer
    _num_parts = 0

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            raise ValueError(f"its header has more than {_MOST_PARTS:,} parts")
        found = super()._get(offset, dtype, count, override_order)
        if len(found) != int(count):
            raise ValueError(f"it ends before byte {offset + int(count)}")
        return found

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            kind, count = _ARRAY_HEAD.unpack_from(memoryview(self.data), orig_offs)
            if count > _MOST_ENTRIES:
                end = self._end_of_array(orig_offs + _ARRAY_HEAD.size, GGUFValueType(kind), count)
                if end > len(self.data):
                    raise ValueError(f"it ends before byte {end}")
                return end - orig_offs, [], [], [GGUFValueType.ARRAY]
        return super()._get_field_parts(orig_offs, raw_type)

    def _end_of_array(self, offset: int, kind: GGUFValueType, count: int) -> int:
        if kind != GGUFValueType.STRING:
            return int(offset + count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize)
        content = memoryview(self.data)
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(content, offset)
            offset += _LENGTH.size + length
        return offset


def read_gguf_file(path: Path) -> GgufFile:
    """Reads the header of the file `path`.

    Raises CheckpointError where it is not a whole GGUF file, UnsupportedModelError for a part of a
    model, and for a type of tensor that the `gguf` package cannot turn into numbers.
    """
    try:
        status = os.stat(path)
        reader = _BoundedReader(path)
        metadata = {name: _value(field) for name, field in reader.fields.items()}
        tensors = {
            one.name: StoredTensor(
                one.tensor_type,
                tuple(reversed(one.shape.tolist())),
                one.data_offset,
                one.n_bytes,
            )
            for one in reader.tensors
        }
        factors = next((one.data for one in reader.tensors if one.name == ROPE_FACTORS), None)
        rope_factors = None if factors is None else tuple(np.ravel(factors).astype(float).tolist())
    except _READING_ERRORS as error:
        raise CheckpointError(f"{path} is truncated, corrupt or no GGUF file: {error}") from None
    if reader.byte_order != "I":
        raise UnsupportedModelError(f"{path} is a GGUF file of the other byte order")
    _refuse_parts(path, metadata)
    _refuse_types(path, tensors)
    return GgufFile(path, status.st_size, status.st_mtime_ns, metadata, tensors, rope_factors)


def _value(field: Any) -> Any:
    """A field's value; None for an array of the vocabulary, and for an empty one."""
    return field.contents() if field.data else None


def _refuse_parts(path: Path, metadata: Mapping[str, Any]) -> None:
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{path} holds no model but a part of one: {kind}")
    if metadata.get("split.count") not in (None, 0, 1):
        raise UnsupportedModelError(
            f"{path} is one of {metadata['split.count']} parts of a model; join them with "
            "llama.cpp's `llama-gguf-split --merge`"
        )


def _refuse_types(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    for name, tensor in tensors.items():
        numbers, num_bytes = GGML_QUANT_SIZES[tensor.ggml_type]
        try:
            dequantize(np.zeros((1, num_bytes), np.uint8), tensor.ggml_type)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{path}: tensor {name} is of the type {tensor.ggml_type.name}, which the gguf "
                "package cannot turn into numbers; quantize the model to another type"
            ) from None
        if not tensor.shape or tensor.shape[-1] % numbers:
            raise CheckpointError(
                f"{path}: rows of tensor {name} are not whole blocks of {tensor.ggml_type.name}"
            )
