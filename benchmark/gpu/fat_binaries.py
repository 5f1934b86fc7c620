"""Empties kernels in a CUDA library that no machine of ours would load, so that it packs small.

A library has its kernels in the section .nv_fatbin: containers, one for each source file, with an
entry for each card. The driver reads the entry of its card and the headers of the others; so an
entry whose contents are zeros costs nothing where it is not chosen, and one that a Hopper could
choose is made one for another card, as if it had never been compiled for this one. Used by
`pack_vllm.py`. The layout is what nvcc 13.0 writes; that a card loads the result is untested.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sgl_pipeline.errors import ConfigurationError

_SECTION = b".nv_fatbin"
_MAGIC = b"\x50\xed\x55\xba"
_ALIGNMENT = 8
_MACHINE_CODE = 2  # an entry's kind; 1 is PTX
_CAPABILITY_AT = 28  # in an entry's header
_ANOTHER_CARD = 120  # whose machine code and PTX no Hopper takes


@dataclass(frozen=True, slots=True)
class Entry:
    """Kernels of one source file for one card: bytes [start, end) of the library, for compute
    capability `capability` / 10. Its header begins at `header`; `has_code` is false for PTX."""

    header: int
    start: int
    end: int
    capability: int
    has_code: bool


def entries(library: bytes | bytearray) -> Iterator[Entry]:
    """All entries of a 64-bit ELF library.

    Raises ConfigurationError where it has no section of kernels, or one of another layout.
    """
    at, section_end = _section(library)
    while at < section_end:
        if library[at : at + 4] != _MAGIC:
            if any(library[at : at + _ALIGNMENT]):
                raise ConfigurationError(f"no container of kernels begins at byte {at}")
            at += _ALIGNMENT
            continue
        _, _, header_size, size = struct.unpack_from("<IHHQ", library, at)
        at += header_size
        yield from _entries_between(library, at, at + size)
        at += size


def empty(library: bytearray, is_kept: Callable[[Entry, bytes], bool]) -> int:
    """Empties what `is_kept`, given an entry and its contents, refuses; returns the bytes kept."""
    kept_bytes = 0
    for entry in list(entries(library)):
        if is_kept(entry, bytes(library[entry.start : entry.end])):
            kept_bytes += entry.end - entry.start
        else:
            library[entry.start : entry.end] = bytes(entry.end - entry.start)
            struct.pack_into("<I", library, entry.header + _CAPABILITY_AT, _ANOTHER_CARD)
    return kept_bytes


def _entries_between(library: bytes | bytearray, at: int, end: int) -> Iterator[Entry]:
    while at < end:
        kind, _, header_size, size = struct.unpack_from("<HHIQ", library, at)
        (capability,) = struct.unpack_from("<I", library, at + _CAPABILITY_AT)
        start = at + header_size
        if not header_size or start + size > end:
            raise ConfigurationError(f"an entry of kernels at byte {at} has another layout")
        yield Entry(at, start, start + size, capability, kind == _MACHINE_CODE)
        at = start + size


def _section(library: bytes | bytearray) -> tuple[int, int]:
    """The bounds of the section of kernels."""
    if library[:5] != b"\x7fELF\x02":
        raise ConfigurationError("it is no 64-bit ELF library")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + n * size) for n in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, length in headers:
        at = names + name
        if bytes(library[at : at + len(_SECTION) + 1]) == _SECTION + b"\0":
            return offset, offset + length
    raise ConfigurationError(f"it has no section {_SECTION.decode()}")
