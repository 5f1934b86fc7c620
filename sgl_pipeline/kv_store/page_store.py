"""A store as seen by the scheduler process and for stages, whatever keeps the bytes."""

import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sgl_pipeline.errors import BrokenObject, StoreError
from sgl_pipeline.kv_store.atomic_files import Buffer
from sgl_pipeline.kv_store.object_names import object_name
from sgl_pipeline.page_record import PageRecord

SELF_TEST_BYTES = 1 << 16


class ObjectStore(Protocol):
    """Objects by name, for stages; see `object_files.ObjectFiles`."""

    def write(self, name: str, buffers: Sequence[Buffer]) -> tuple[int, int]: ...
    def read_into(self, name: str, buffer: Buffer, num_bytes: int, checksum: int) -> None: ...
    def delete(self, name: str) -> None: ...


class StoreCounts(NamedTuple):
    """Contents of a store, of all digests, and the pages that it evicted since the start; zeros
    where its backend does not say."""

    held_bytes: int = 0
    held_files: int = 0
    evicted_pages: int = 0


class PageStore(Protocol):
    """Pages of one digest, for the scheduler process; one thread uses it. Methods raise OSError
    and StoreError."""

    def lookup(self, hashes: Sequence[bytes]) -> list[PageRecord]:
        """The records of the longest prefix of `hashes` that is there."""

    def commit(self, records: Sequence[PageRecord]) -> None:
        """Makes pages found whose objects are all written."""

    def drop(self, page_hash: bytes) -> None:
        """Removes a page: its record, then its objects."""

    def clear(self) -> int:
        """Removes all pages of this digest; gives how many."""

    def tend(self) -> float:
        """Does a short piece of upkeep; gives the seconds until the next is due."""

    def counts(self) -> StoreCounts: ...


def self_test(objects: ObjectStore, digest: str) -> None:
    """Writes, reads, compares and deletes an object of a made-up page. Raises StoreError where the
    store fails."""
    name = object_name(os.urandom(32), digest, 0)
    content = os.urandom(SELF_TEST_BYTES)
    size, checksum = objects.write(name, [content[:100], content[100:]])
    found = bytearray(size)
    objects.read_into(name, found, size, checksum)
    if found != content:
        raise StoreError("the store gave back other bytes than it was given")
    objects.delete(name)
    try:
        objects.read_into(name, found, size, checksum)
    except BrokenObject:
        return
    raise StoreError("the store still has an object that was deleted")
