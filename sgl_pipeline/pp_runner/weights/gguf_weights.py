"""Weights from a GGUF file, by the index of its model directory.

The only file that turns blocks of GGUF into numbers, by the `gguf` package, which is imported for
this format alone. Bytes are read, not mapped: a file that is cut short while it is read is then an
error and no signal that kills the process.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import gguf
import numpy as np
import torch

from sgl_pipeline.errors import CheckpointError
from sgl_pipeline.gguf_index import (
    GgufIndex,
    GgufTensor,
    open_gguf,
    read_gguf_index,
    read_into,
    weights_file,
)

# Rows are turned into numbers some at a time, so that no whole copy in fp32 is ever made.
_NUMBERS_AT_ONCE = 2**22


class GgufWeights:
    """The tensors of the GGUF file in the model directory `path`, dequantized to `dtype`.

    Args:
        index: that of the directory; None: it is read now, and CheckpointError raised as in
            `read_gguf_index`.
    """

    is_made_up = False

    def __init__(
        self,
        path: str | Path,
        dtype: torch.dtype,
        device: torch.device,
        index: GgufIndex | None = None,
    ) -> None:
        self.loaded: dict[str, int] = {}
        self.dtype = dtype
        self._directory = Path(path)
        self._device = device
        self._index = read_gguf_index(self._directory) if index is None else index

    def has(self, name: str) -> bool:
        return name in self._index.tensors

    def names(self) -> Iterable[str]:
        return self._index.tensors.keys()

    def shape_of(self, name: str) -> tuple[int, ...]:
        if (found := self._index.tensors.get(name)) is None:
            raise CheckpointError(f"{self._file_name} holds no tensor {name}")
        return tuple(found.shape)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        found = self._index.tensors.get(name)
        if found is None:
            raise CheckpointError(
                f"{self._file_name} holds no tensor {name} (expected with shape {list(shape)})"
            )
        if _without_ones(found.shape) != _without_ones(shape):
            raise CheckpointError(
                f"{self._file_name}: tensor {name} has shape {list(found.shape)}, the model asks "
                f"for {list(shape)}"
            )
        tensor = self._numbers(found)
        if found.paired_heads:
            tensor = _in_halves(tensor, found.paired_heads)
        if not all(math.isfinite(end.item()) for end in tensor.aminmax()):
            raise CheckpointError(
                f"{self._file_name}: tensor {name} holds a number that is not finite in "
                f"{self.dtype}; the file is corrupt, or --dtype must be wider"
            )
        tensor = tensor.reshape(shape).to(self._device)
        self.loaded[name] = tensor.nbytes
        return tensor

    def read_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise CheckpointError(f"{self._file_name} holds no tensor {name} of {dtype}")

    def read_parts(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Iterator[torch.Tensor]:
        raise CheckpointError(f"{self._file_name} holds no stack {name}")

    @property
    def _file_name(self) -> Path:
        return weights_file(self._directory)

    def _numbers(self, found: GgufTensor) -> torch.Tensor:
        """All of a tensor in the model's dtype."""
        tensor = torch.empty(found.shape, dtype=self.dtype)
        rows = tensor.view(-1, found.shape[-1])
        row_bytes = found.num_bytes // len(rows)
        rows_at_once = max(1, _NUMBERS_AT_ONCE // found.shape[-1])
        kind = gguf.GGMLQuantizationType(found.ggml_type)
        with open_gguf(self._directory, self._index) as file:
            for start in range(0, len(rows), rows_at_once):
                part = rows[start : start + rows_at_once]
                blocks = np.empty((len(part), row_bytes), np.uint8)
                read_into(blocks, file, found.offset + start * row_bytes)
                part.copy_(torch.from_numpy(gguf.dequantize(blocks, kind)))
        return tensor


def _in_halves(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [H * D, ...] whose rotated pairs are neighbors, so that they are of two halves."""
    pairs = tensor.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]
