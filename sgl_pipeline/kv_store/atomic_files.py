"""Files for their owner alone that a reader sees whole or not at all."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress

Buffer = bytes | bytearray | memoryview

DRAFT_NAME = re.compile(r"\.[0-9a-f]{32}\.sgl_pipeline\.tmp")


def write_atomically(folder: str, name: str, buffers: Sequence[Buffer]) -> None:
    """Makes or replaces the file `name`, with the bytes of `buffers` one after the other.

    A killed process leaves at most a draft (`DRAFT_NAME`). Nothing is synced: after a lost machine
    a file may be short or empty. Raises OSError.
    """
    draft = f"{folder}/.{os.urandom(16).hex()}.sgl_pipeline.tmp"
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            write_all(file, buffers)
        finally:
            os.close(file)
        os.replace(draft, f"{folder}/{name}")
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


def write_all(file: int, buffers: Sequence[Buffer]) -> None:
    """Writes all bytes to a descriptor, however many the kernel takes at a time."""
    left = [memoryview(buffer).cast("B") for buffer in buffers]
    while left:
        left = behind(left, os.writev(file, left))


def behind(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """The part of consecutive buffers that follows their first `num_bytes`."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    return []


def remove_file(path: str) -> bool:
    """Removes a file; False where it is gone already."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
