"""Objects as files: what stages write and read. Names are those of `object_names.py`."""

import os
import zlib
from collections.abc import Iterable, Sequence

from sgl_pipeline.errors import BrokenObject, StoreError
from sgl_pipeline.kv_store.atomic_files import Buffer, behind, remove_file, write_atomically
from sgl_pipeline.kv_store.disk_guard import FULL_ERRORS, DiskGuard
from sgl_pipeline.kv_store.object_names import object_name
from sgl_pipeline.kv_store.store_folder import StoreFolder


class ObjectFiles:
    """The objects in a folder. One thread writes, others may read."""

    # A file costs 0.1 ms of a core and more, whatever is in it.
    groups_layers = True

    def __init__(self, folder: StoreFolder, guard: DiskGuard | None = None) -> None:
        self._folder = folder
        self._guard = guard or DiskGuard(folder)

    def write(self, name: str, parts: Sequence[Buffer]) -> list[int]:
        """Makes or replaces an object of `parts`; gives the CRC-32 of each.

        Raises StoreFull while the disk is full, StoreError where the file cannot be written.
        """
        try:
            self._guard.admit(sum(memoryview(part).nbytes for part in parts))
            write_atomically(self._folder.path, f"{name}.bin", parts)
        except OSError as error:
            if error.errno in FULL_ERRORS:
                raise self._guard.turn_off(os.strerror(error.errno)) from None
            raise StoreError(f"object {name} cannot be written: {error.strerror}") from None
        return [zlib.crc32(part) for part in parts]

    def read_into(
        self,
        name: str,
        parts: Sequence[Buffer],
        checksums: Sequence[int],
        num_bytes: int,
        offset: int = 0,
    ) -> None:
        """Fills writable buffers, one after the other, with an object's bytes from `offset` on.

        Args:
            checksums: CRC-32 of each of `parts`.
            num_bytes: of the whole object.

        Raises BrokenObject where the object is missing, has another size or other bytes, StoreError
        where it cannot be read. The buffers may be overwritten even so.
        """
        try:
            found_bytes = _read_file(self._folder.object_file(name), parts, offset)
        except FileNotFoundError:
            raise BrokenObject(f"object {name} is missing") from None
        except OSError as error:
            raise StoreError(f"object {name} cannot be read: {error.strerror}") from None
        if found_bytes != num_bytes:
            raise BrokenObject(f"object {name} has {found_bytes} bytes, {num_bytes} were written")
        if [*map(zlib.crc32, parts)] != [*checksums]:
            raise BrokenObject(f"object {name} is altered: its checksum is another one")

    def delete(self, name: str) -> bool:
        """Removes an object, if it is there; False where the file cannot be removed."""
        try:
            remove_file(self._folder.object_file(name))
        except OSError:
            return False
        return True


def remove_objects(
    folder: StoreFolder, page_hash: bytes, digest: str, objects: Iterable[range]
) -> None:
    """Removes the objects of a page whose record is gone; `objects` are the layers of each. Raises
    OSError."""
    for layers in objects:
        remove_file(folder.object_file(object_name(page_hash, digest, layers)))


def _read_file(path: str, parts: Sequence[Buffer], offset: int) -> int:
    """Fills `parts` as far as the file goes; gives the file's size."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        left = [memoryview(part).cast("B") for part in parts]
        while left and (num_read := os.preadv(file, left, offset)):
            left = behind(left, num_read)
            offset += num_read
        return os.fstat(file).st_size
    finally:
        os.close(file)
