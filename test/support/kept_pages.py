"""What a store of tests keeps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sgl_pipeline.object_layers import ObjectPart
from sgl_pipeline.page_record import PageRecord

C = TypeVar("C")


@dataclass
class KeptPages(Generic[C]):
    """Objects, each of some layers of a page, and records."""

    objects: dict[tuple[bytes, range], list[C]] = field(default_factory=dict)
    records: dict[bytes, PageRecord] = field(default_factory=dict)

    def part(self, page_hash: bytes, part: ObjectPart) -> list[C] | None:
        """What an object has of each layer of `part`, whose layers have a size of 1; None where it
        is gone."""
        whole = self.objects.get((page_hash, part.object_layers))
        return None if whole is None else whole[part.offset : part.offset + len(part.layers)]

    def lookup(self, hashes: Sequence[bytes]) -> list[PageRecord]:
        """The records of the first pages, until one is missing."""
        found: list[PageRecord] = []
        for page_hash in hashes:
            if (record := self.records.get(page_hash)) is None:
                break
            found.append(record)
        return found
