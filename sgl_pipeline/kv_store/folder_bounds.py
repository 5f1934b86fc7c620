"""Keeps a store's folder within its bounds: the pages that were used least recently go.

Pages of all digests count, since no server asks any more for those of earlier weights. Several
servers may use one folder: each scans it now and then, and files that vanish meanwhile do no harm.
Where they split layers in other ways, a page's newer record names other objects than the one before
it, whose objects are then leftovers. Files with other names than ours are never touched.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from sgl_pipeline.kv_store.atomic_files import DRAFT_NAME, remove_file
from sgl_pipeline.kv_store.disk_guard import MIN_FREE_BYTES
from sgl_pipeline.kv_store.object_files import remove_objects
from sgl_pipeline.kv_store.object_names import DIGEST_NAME, OBJECT_NAME, RECORD_NAME
from sgl_pipeline.kv_store.page_records import read_record
from sgl_pipeline.kv_store.store_folder import StoreFolder
from sgl_pipeline.page_record import PageRecord

FREE_SHARE = 0.8
MAX_FILES = 1_000_000
# Objects that no record names, and drafts, may belong to a save or a load under way until they are
# so old.
ORPHAN_S = 600.0
RESCAN_S = 600.0
# Between scans while the folder cannot be brought within its bounds.
RETRY_S = 60.0
# So many files are looked at before other work of the thread gets its turn.
SLICE_FILES = 64


@dataclass(frozen=True, kw_only=True)
class StoreBounds:
    """`max_bytes` None: FREE_SHARE of what is free at the start and of what the store has."""

    max_bytes: int | None = None
    max_files: int = MAX_FILES
    min_free_bytes: int = MIN_FREE_BYTES


class _Page(NamedTuple):
    used_ns: int
    digest: str
    hash_hex: str
    num_bytes: int
    objects: tuple[range, ...]  # the layers of each

    @property
    def num_files(self) -> int:
        return len(self.objects) + 1


class FolderBounds:
    """Scans the folder and evicts, a slice at a time; one thread uses it."""

    def __init__(
        self,
        folder: StoreFolder,
        bounds: StoreBounds,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._bounds = bounds
        self._clock = clock
        self._max_bytes = bounds.max_bytes
        self._oldest: deque[_Page] = deque()
        self._scan: Iterator[None] | None = None
        self._next_scan_s = self._next_scan_when_over_s = float("-inf")
        self.held_bytes = 0
        self.held_files = 0
        self.evicted_pages = 0

    def add(self, record: PageRecord) -> None:
        """Counts a page that was committed."""
        self.held_bytes += sum(record.sizes)
        self.held_files += len(record.objects) + 1
        self._next_scan_when_over_s = float("-inf")

    def rescan(self) -> None:
        """Counts anew, since many files have gone."""
        self._end_scan(deque())
        self._next_scan_s = float("-inf")

    def work(self) -> float:
        """Does a slice of what is due; gives the seconds until something else is."""
        if self._scan is not None:
            self._advance_scan()
            return 0.0
        if self._is_over():
            if self._oldest:
                self._evict_slice()
                return 0.0
            self._next_scan_s = min(self._next_scan_s, self._next_scan_when_over_s)
        wait_s = max(0.0, self._next_scan_s - self._clock())
        if wait_s == 0.0:
            self._scan = self._scan_folder()
        return wait_s

    def _is_over(self) -> bool:
        return (
            (self._max_bytes is not None and self.held_bytes > self._max_bytes)
            or self.held_files > self._bounds.max_files
            or self._folder.free_bytes() < self._bounds.min_free_bytes
        )

    def _advance_scan(self) -> None:
        assert self._scan is not None
        try:
            next(self._scan)
        except StopIteration:
            self._scan = None
        except OSError:
            self._end_scan(self._oldest)
            raise

    def _end_scan(self, oldest: deque[_Page]) -> None:
        self._scan = None
        self._oldest = oldest
        now_s = self._clock()
        self._next_scan_s = now_s + RESCAN_S
        # What a scan finds goes or is used meanwhile, and another scan finds more.
        self._next_scan_when_over_s = now_s if oldest else now_s + RETRY_S

    def _scan_folder(self) -> Iterator[None]:
        """Counts all pages, then removes what was left by killed servers."""
        pages = []
        for page in self._pages():
            if page is None:
                yield
            else:
                pages.append(page)
        pages.sort()
        self.held_bytes = sum(page.num_bytes for page in pages)
        self.held_files = sum(page.num_files for page in pages)
        if self._max_bytes is None:
            room_bytes = self._folder.free_bytes() + self.held_bytes
            self._max_bytes = int(FREE_SHARE * room_bytes)
        yield from self._remove_leftovers(
            {(page.digest, page.hash_hex): page.objects for page in pages}
        )
        self._end_scan(deque(pages))

    def _pages(self) -> Iterator[_Page | None]:
        """All pages that have a record; None after each slice. Damaged records are removed."""
        for digest in os.listdir(self._folder.records):
            if DIGEST_NAME.fullmatch(digest):
                with os.scandir(self._folder.records_of(digest)) as entries:
                    for index, entry in enumerate(entries):
                        if (page := self._page(digest, entry)) is not None:
                            yield page
                        if index % SLICE_FILES == 0:
                            yield None

    def _page(self, digest: str, entry: os.DirEntry[str]) -> _Page | None:
        if DRAFT_NAME.fullmatch(entry.name):
            self._remove_if_old(entry.path)
        if not RECORD_NAME.fullmatch(entry.name):
            return None
        try:
            used_ns = entry.stat().st_mtime_ns
            record = read_record(entry.path, digest, bytes.fromhex(entry.name))
        except FileNotFoundError:
            return None
        if record is None:
            remove_file(entry.path)
            return None
        return _Page(used_ns, digest, entry.name, sum(record.sizes), record.objects)

    def _remove_leftovers(
        self, known: Mapping[tuple[str, str], tuple[range, ...]]
    ) -> Iterator[None]:
        """Removes what is old and is a draft, or an object that no record names.

        Args:
            known: the objects of pages, by digest and hash.
        """
        with os.scandir(self._folder.path) as entries:
            for index, entry in enumerate(entries):
                if self._is_leftover(entry.name, known):
                    self._remove_if_old(entry.path)
                if index % SLICE_FILES == 0:
                    yield

    def _is_leftover(self, name: str, known: Mapping[tuple[str, str], tuple[range, ...]]) -> bool:
        found = OBJECT_NAME.fullmatch(name.removesuffix(".bin"))
        if found is None:
            return DRAFT_NAME.fullmatch(name) is not None
        hash_hex, digest, first, end = found.groups()
        layers = range(int(first), int(end))
        return layers not in known.get((digest, hash_hex), ()) and not self._is_named(
            layers, digest, hash_hex
        )

    def _is_named(self, layers: range, digest: str, hash_hex: str) -> bool:
        """True if the record of a page, which may be newer than the scan, has this object."""
        record_file = f"{self._folder.records_of(digest)}/{hash_hex}"
        try:
            record = read_record(record_file, digest, bytes.fromhex(hash_hex))
        except FileNotFoundError:
            return False
        return record is not None and layers in record.objects

    def _remove_if_old(self, path: str) -> None:
        with suppress(FileNotFoundError):
            if self._clock() - os.stat(path).st_mtime > ORPHAN_S:
                remove_file(path)

    def _evict_slice(self) -> None:
        num_files = 0
        while self._oldest and num_files < SLICE_FILES and self._is_over():
            page = self._oldest.popleft()
            num_files += page.num_files
            self._evict(page)

    def _evict(self, page: _Page) -> None:
        """Removes a page, unless it was used since the scan."""
        record_file = f"{self._folder.records_of(page.digest)}/{page.hash_hex}"
        with suppress(FileNotFoundError):
            if os.stat(record_file).st_mtime_ns != page.used_ns:
                return
        if remove_file(record_file):
            self.evicted_pages += 1
        self.held_bytes -= page.num_bytes
        self.held_files -= page.num_files
        remove_objects(self._folder, bytes.fromhex(page.hash_hex), page.digest, page.objects)
