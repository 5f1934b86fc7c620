"""What a store of tests keeps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sgl_pipeline.page_record import PageRecord

C = TypeVar("C")


@dataclass
class KeptPages(Generic[C]):
    """Objects, each a page of one layer, and records."""

    objects: dict[tuple[bytes, int], C] = field(default_factory=dict)
    records: dict[bytes, PageRecord] = field(default_factory=dict)

    def lookup(self, hashes: Sequence[bytes]) -> list[PageRecord]:
        """The records of the first pages, until one is missing."""
        found: list[PageRecord] = []
        for page_hash in hashes:
            if (record := self.records.get(page_hash)) is None:
                break
            found.append(record)
        return found
