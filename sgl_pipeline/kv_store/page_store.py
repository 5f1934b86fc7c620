"""A store as seen by the scheduler process and for stages, whatever keeps the bytes."""

import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sgl_pipeline.errors import BrokenObject, StoreError
from sgl_pipeline.kv_store.atomic_files import Buffer
from sgl_pipeline.kv_store.object_names import object_name
from sgl_pipeline.page_record import PageRecord

# Fits in an object of any store: it is no larger than a page of memory.
SELF_TEST_BYTES = 1 << 12


class ObjectStore(Protocol):
    """Objects by name, for stages; see `object_files.ObjectFiles`.

    A part is what an object has of one layer.
    """

    @property
    def groups_layers(self) -> bool:
        """True if an object may have several parts, of which some can be read; else it has one."""

    def write(self, name: str, parts: Sequence[Buffer]) -> list[int]:
        """Makes an object; gives the checksum of each part."""

    def read_into(
        self,
        name: str,
        parts: Sequence[Buffer],
        checksums: Sequence[int],
        num_bytes: int,
        offset: int = 0,
    ) -> None:
        """Fills buffers with the parts of an object of `num_bytes` from `offset` on."""

    def delete(self, name: str) -> bool:
        """Removes an object, if it is there; False where the store cannot."""


class StoreCounts(NamedTuple):
    """Contents of a store, of all digests, and the pages that it evicted since the start."""

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


def self_test(objects: ObjectStore, digest: str) -> None:
    """Writes, reads, compares and deletes an object of a made-up page. Raises StoreError where the
    store fails. A store that cannot delete keeps it until it evicts it."""
    content = os.urandom(SELF_TEST_BYTES)
    cut = 100 if objects.groups_layers else 0
    parts = [content[:cut], content[cut:]] if cut else [content]
    name = object_name(os.urandom(32), digest, range(len(parts)))
    checksum = objects.write(name, parts)[-1]
    found = bytearray(len(parts[-1]))

    def read_last_part() -> None:
        objects.read_into(name, [found], [checksum], len(content), cut)

    read_last_part()
    if found != parts[-1]:
        raise StoreError("the store gave back other bytes than it was given")
    if not objects.delete(name):
        return
    try:
        read_last_part()
    except BrokenObject:
        return
    raise StoreError("the store still has an object that was deleted")
