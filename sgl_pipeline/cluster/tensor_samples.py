"""Tells the tensors of a safetensors file apart by name, dtype, shape and a sample of their bytes.

For processes that import neither torch nor safetensors. The format: the
length of a JSON header in 8 bytes, little endian; the header, which names dtype, shape and place of
each tensor; the tensors (https://huggingface.co/docs/safetensors).

A tensor of up to `WHOLE_BYTES` is hashed whole: norms, biases and scales, where a few values may be
all that differs. Of a larger one `NUM_BLOCKS` blocks of `BLOCK_BYTES` are, 24 KiB in all: the
first, the last, and others between that fall into different columns of a matrix. Training, merging
and quantizing change a matrix nearly everywhere, so any of the 12,288 weights of 16 bits tells.
More blocks would cost more: each is a random read, and a model of many experts has tens of
thousands of tensors. What is not found is a change of a few rows of a large matrix, such as the
embeddings of added tokens.
"""

import hashlib
import os
from collections.abc import Iterator

import msgspec

from sgl_pipeline.decoding import DECODING_ERRORS
from sgl_pipeline.errors import CheckpointError

WHOLE_BYTES = 64 * 1024
BLOCK_BYTES = 4096
NUM_BLOCKS = 6
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
# Multiples of the golden ratio are spread evenly and in no step with rows (Knuth, TAOCP 6.4).
_GOLDEN, _ONE = 0x9E3779B9, 1 << 32


class TensorSample(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as its file has it. `content` is a hash of its length and its sampled bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: str


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the header; `data_offsets` are from the header's end, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_Entry).decode


def sample_tensors(file: int, path: str) -> dict[str, TensorSample]:
    """All tensors by name of the open `file`, whose name for people is `path`.

    Raises CheckpointError where it is truncated or no safetensors file, OSError where it cannot be
    read.
    """
    entries, data_start = _read_header(file, path)
    # The kernel reads nothing around the blocks, and fetches many of them at once.
    os.posix_fadvise(file, data_start, 0, os.POSIX_FADV_RANDOM)
    for entry in entries.values():
        for offset, length in _blocks(entry, data_start):
            os.posix_fadvise(file, offset, length, os.POSIX_FADV_WILLNEED)
    return {
        name: TensorSample(
            entry.dtype,
            entry.shape,
            sample_content(
                file,
                data_start + entry.data_offsets[0],
                entry.data_offsets[1] - entry.data_offsets[0],
                path,
            ),
        )
        for name, entry in entries.items()
    }


def sampled_ranges(num_bytes: int) -> list[tuple[int, int]]:
    """The hashed bytes of a tensor of `num_bytes`: (first byte, count), in order."""
    if num_bytes <= WHOLE_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - BLOCK_BYTES
    between = (last * (number * _GOLDEN % _ONE) // _ONE for number in range(1, NUM_BLOCKS - 1))
    return [(first, BLOCK_BYTES) for first in sorted((0, *between, last))]


def _read_header(file: int, path: str) -> tuple[dict[str, _Entry], int]:
    """The file's tensors, and the place of their first byte."""
    length = int.from_bytes(_read(file, path, 0, 8), "little")
    if length > _MOST_HEADER_BYTES:
        raise CheckpointError(f"{path} is truncated or corrupt: a header of {length} bytes")
    try:
        header = _decode_header(_read(file, path, 8, length))
        header.pop("__metadata__", None)
        entries = {name: _decode_entry(raw) for name, raw in header.items()}
    except DECODING_ERRORS as error:
        raise CheckpointError(f"{path} is truncated or corrupt: {error}") from None
    data_start = 8 + length
    num_bytes = os.fstat(file).st_size - data_start
    for name, entry in entries.items():
        if not 0 <= entry.data_offsets[0] <= entry.data_offsets[1] <= num_bytes:
            raise CheckpointError(f"{path} is truncated or corrupt: it ends before tensor {name}")
    return entries, data_start


def _blocks(entry: _Entry, data_start: int) -> Iterator[tuple[int, int]]:
    """The places of the sampled bytes in the file."""
    first, end = entry.data_offsets
    for offset, length in sampled_ranges(end - first):
        yield data_start + first + offset, length


def sample_content(file: int, offset: int, num_bytes: int, path: str) -> str:
    """`TensorSample.content` of the tensor at `offset` of the open `file`. Raises CheckpointError
    where that ends before it, OSError where it cannot be read."""
    digest = hashlib.sha256(num_bytes.to_bytes(8, "little"))
    for first, length in sampled_ranges(num_bytes):
        digest.update(_read(file, path, offset + first, length))
    return digest.hexdigest()[:32]


def _read(file: int, path: str, offset: int, length: int) -> bytes:
    content = os.pread(file, length, offset)
    if len(content) < length:
        raise CheckpointError(f"{path} is truncated or corrupt: it ends at byte {offset + length}")
    return content
