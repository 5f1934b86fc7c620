"""Objects as files: what stages write and read. Names are those of `object_names.py`."""

import os
import zlib
from collections.abc import Sequence
from contextlib import suppress

from sgl_pipeline.errors import BrokenObject, StoreError
from sgl_pipeline.kv_store.atomic_files import Buffer, remove_file, write_atomically
from sgl_pipeline.kv_store.disk_guard import FULL_ERRORS, DiskGuard
from sgl_pipeline.kv_store.store_folder import StoreFolder


class ObjectFiles:
    """The objects in a folder. One thread writes, others may read."""

    def __init__(self, folder: StoreFolder, guard: DiskGuard | None = None) -> None:
        self._folder = folder
        self._guard = guard or DiskGuard(folder)

    def write(self, name: str, buffers: Sequence[Buffer]) -> tuple[int, int]:
        """Makes or replaces an object; gives its bytes and their CRC-32.

        Args:
            buffers: its content, one contiguous part after the other.

        Raises StoreFull while the disk is full, StoreError where the file cannot be written.
        """
        num_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        try:
            self._guard.admit(num_bytes)
            write_atomically(self._folder.path, f"{name}.bin", buffers)
        except OSError as error:
            if error.errno in FULL_ERRORS:
                raise self._guard.turn_off(os.strerror(error.errno)) from None
            raise StoreError(f"object {name} cannot be written: {error.strerror}") from None
        checksum = 0
        for buffer in buffers:
            checksum = zlib.crc32(buffer, checksum)
        return num_bytes, checksum

    def read_into(self, name: str, buffer: Buffer, num_bytes: int, checksum: int) -> None:
        """Fills the first `num_bytes` of a writable buffer with an object.

        Raises BrokenObject where the object is missing or is not what `num_bytes` and `checksum`
        (CRC-32) say, StoreError where it cannot be read. The buffer may be overwritten even so.
        """
        content = memoryview(buffer).cast("B")[:num_bytes]
        assert len(content) == num_bytes
        try:
            found_bytes = _read_file(self._folder.object_file(name), content)
        except FileNotFoundError:
            raise BrokenObject(f"object {name} is missing") from None
        except OSError as error:
            raise StoreError(f"object {name} cannot be read: {error.strerror}") from None
        if found_bytes != num_bytes:
            raise BrokenObject(f"object {name} has {found_bytes} bytes, {num_bytes} were written")
        if zlib.crc32(content) != checksum:
            raise BrokenObject(f"object {name} is altered: its checksum is another one")

    def delete(self, name: str) -> None:
        """Removes an object, if it is there and can be removed."""
        with suppress(OSError):
            remove_file(self._folder.object_file(name))


def _read_file(path: str, content: memoryview) -> int:
    """Fills `content` as far as the file goes; gives the file's size."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        num_read = 0
        while num_read < len(content):
            step = os.readv(file, [content[num_read:]])
            if step == 0:
                return num_read
            num_read += step
        return os.fstat(file).st_size
    finally:
        os.close(file)
