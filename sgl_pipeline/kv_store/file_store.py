"""The pages of one digest in a folder, as the scheduler process finds, commits and removes them."""

import os
import time
from collections.abc import Callable, Sequence

from sgl_pipeline.kv_store.atomic_files import remove_file
from sgl_pipeline.kv_store.folder_bounds import FolderBounds, StoreBounds
from sgl_pipeline.kv_store.object_files import remove_objects
from sgl_pipeline.kv_store.object_names import OBJECT_NAME, RECORD_NAME
from sgl_pipeline.kv_store.page_records import RecordFiles
from sgl_pipeline.kv_store.page_store import StoreCounts
from sgl_pipeline.kv_store.store_folder import StoreFolder
from sgl_pipeline.page_record import PageRecord


class FileStore:
    """A `PageStore`. Several servers may use one folder: a key has one content, whoever wrote."""

    def __init__(
        self,
        folder: StoreFolder,
        digest: str,
        num_layers: int,
        bounds: StoreBounds | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._digest = digest
        self._records = RecordFiles(folder, digest, num_layers, clock)
        self._bounds = FolderBounds(folder, bounds or StoreBounds(), clock)

    def lookup(self, hashes: Sequence[bytes]) -> list[PageRecord]:
        return self._records.lookup(hashes)

    def commit(self, records: Sequence[PageRecord]) -> None:
        self._records.write(records)
        for record in records:
            self._bounds.add(record)

    def drop(self, page_hash: bytes) -> None:
        record = self._records.take(page_hash)
        if record is not None:
            remove_objects(self._folder, page_hash, self._digest, record.objects)

    def clear(self) -> int:
        records = self._folder.records_of(self._digest)
        names = os.listdir(records) if os.path.isdir(records) else []
        num_pages = sum(
            remove_file(f"{records}/{name}") for name in names if RECORD_NAME.fullmatch(name)
        )
        for entry in os.scandir(self._folder.path):
            found = OBJECT_NAME.fullmatch(entry.name.removesuffix(".bin"))
            if found is not None and found[2] == self._digest:
                remove_file(entry.path)
        self._bounds.rescan()
        return num_pages

    def tend(self) -> float:
        return self._bounds.work()

    def counts(self) -> StoreCounts:
        bounds = self._bounds
        return StoreCounts(bounds.held_bytes, bounds.held_files, bounds.evicted_pages)
