"""The places of a GGUF file's tensors, by the names of a checkpoint in Hugging Face format.

`managers/gguf/` writes this index once for a file; stages read their tensors by it, and
`cluster/model_digest.py` compares hosts by it. Imports neither torch nor gguf.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import CheckpointError, MalformedData

INDEX_FILE = "gguf_index.json"
WEIGHTS_FILE = "model.gguf"


class GgufTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, or one expert's part of it.

    `ggml_type` is the number of its type in the format, `shape` as Hugging Face has it, `offset`
    in bytes from the start of the file. The rows of each of `paired_heads` heads lie in the order
    of llama.cpp's rotary embedding, which rotates neighbors; 0: they lie in halves, as elsewhere.
    """

    ggml_type: int
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    paired_heads: int = 0


class GgufIndex(msgspec.Struct, frozen=True):
    """The tensors by name; they are those of the file as long as its size and time are these."""

    size: int
    mtime_ns: int
    tensors: dict[str, GgufTensor]


_decoder: msgspec.json.Decoder[GgufIndex] = msgspec.json.Decoder(GgufIndex)


def read_gguf_index(directory: Path) -> GgufIndex:
    """Raises CheckpointError where it is missing or unreadable."""
    path = directory / INDEX_FILE
    try:
        return decode(_decoder, path.read_bytes())
    except (OSError, MalformedData) as error:
        raise CheckpointError(f"{path} is not an index of tensors: {error}") from None


def write_gguf_index(directory: Path, index: GgufIndex) -> None:
    (directory / INDEX_FILE).write_bytes(msgspec.json.encode(index))


def weights_file(directory: Path) -> Path:
    """The GGUF file itself, as people know it."""
    return (directory / WEIGHTS_FILE).resolve()


@contextmanager
def open_gguf(directory: Path, index: GgufIndex) -> Iterator[int]:
    """A descriptor of the weights file, for reading. Raises CheckpointError where it is missing, or
    is not the one that `index` was made of."""
    path = weights_file(directory)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"weights file {path}: {error.strerror}") from None
    try:
        status = os.fstat(file)
        if (status.st_size, status.st_mtime_ns) != (index.size, index.mtime_ns):
            raise CheckpointError(f"{path} has changed since the server began to start")
        yield file
    finally:
        os.close(file)


def read_into(buffer: Any, file: int, offset: int) -> None:
    """Fills the bytes of `buffer` from byte `offset` of a file. Raises CheckpointError where that
    ends before them, or cannot be read."""
    try:
        num_read = os.preadv(file, [buffer], offset)
    except OSError as error:
        raise CheckpointError(f"the weights file cannot be read: {error.strerror}") from None
    if num_read < memoryview(buffer).nbytes:
        raise CheckpointError(f"the weights file ends at byte {offset + num_read}")
