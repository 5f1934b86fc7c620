"""The pages of the stages' host memory, as the scheduler process finds, commits and forgets them.

Stages overwrite by themselves what was used least recently (`host_objects.py`). Saves and loads use
pages there in the same sequence as commits and lookups here, so both forget the same pages, and
this side forgets them first: it keeps `PAGES_UNDER_WAY` fewer. A page that a stage has overwritten
all the same (lookups are ahead of their loads, and a save that failed took room), or that is not in
the memory of a new worker, costs one load that fails, and then its record is gone.
"""

from collections import OrderedDict
from collections.abc import Sequence

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.kv_store.page_store import StoreCounts
from sgl_pipeline.page_record import PageRecord

# The most that stages may be writing, and are not committed: all saves that
# `scheduling/page_saves.py` has under way.
PAGES_UNDER_WAY = 256
# There is no upkeep.
NEVER_S = 3600.0


def host_page_count(
    ratio: float, size_bytes: int, pool_pages: int, stage_page_bytes: Sequence[int]
) -> int:
    """The pages that each stage keeps in host memory: as many as `size_bytes` hold on the stage
    whose pages are largest, or, where that is 0, `ratio` times those of the pool (SGLang 0.5.23,
    `mem_cache/pool_host/base.py`).

    Args:
        stage_page_bytes: of a page's layers on each stage.

    Raises ConfigurationError where that is not a page.
    """
    num_pages = size_bytes // max(stage_page_bytes) if size_bytes else int(ratio * pool_pages)
    if num_pages < 1:
        knob = "--hicache-size" if size_bytes else "--hicache-ratio"
        raise ConfigurationError(
            f"{knob} leaves no room for a single page in host memory: raise it"
        )
    return num_pages


class HostPages:
    """A `PageStore` for the stages of one server.

    Args:
        num_pages: what each stage has room for.
    """

    def __init__(self, num_pages: int) -> None:
        self._most_pages = max(num_pages - PAGES_UNDER_WAY, num_pages // 2, 1)
        self._records: OrderedDict[bytes, PageRecord] = OrderedDict()
        self._held_bytes = 0
        self._evicted_pages = 0

    def lookup(self, hashes: Sequence[bytes]) -> list[PageRecord]:
        records = []
        for page_hash in hashes:
            record = self._records.get(page_hash)
            if record is None:
                break
            self._records.move_to_end(page_hash)
            records.append(record)
        return records

    def commit(self, records: Sequence[PageRecord]) -> None:
        for record in records:
            self.drop(record.page_hash)
            self._records[record.page_hash] = record
            self._held_bytes += sum(record.sizes)
        while len(self._records) > self._most_pages:
            self.drop(next(iter(self._records)))
            self._evicted_pages += 1

    def drop(self, page_hash: bytes) -> None:
        """Its objects stay until their room is needed."""
        record = self._records.pop(page_hash, None)
        if record is not None:
            self._held_bytes -= sum(record.sizes)

    def clear(self) -> int:
        num_pages = len(self._records)
        self._records.clear()
        self._held_bytes = 0
        return num_pages

    def tend(self) -> float:
        return NEVER_S

    def counts(self) -> StoreCounts:
        return StoreCounts(held_bytes=self._held_bytes, evicted_pages=self._evicted_pages)
