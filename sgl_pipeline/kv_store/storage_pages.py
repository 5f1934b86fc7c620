"""The pages of one digest in a storage backend of SGLang.

Records are objects of the store itself, beside those that they commit, so that every host that
reaches the store finds the pages. They are padded as all its objects are.
"""

from collections.abc import Sequence

from sgl_pipeline.kv_store.page_records import decode_record, encode_record
from sgl_pipeline.kv_store.storage_client import StorageClient
from sgl_pipeline.page_record import PageRecord

# Backends evict by themselves.
NEVER_S = 3600.0
LENGTH_BYTES = 4


class StoragePages:
    """A `PageStore`. SGLang's interface cannot delete: a dropped page is not found by this server
    until it is committed again, and other servers learn by themselves that it is broken. `clear`
    removes all that the backend has, as upstream's does; mooncake keeps for some seconds what was
    read."""

    def __init__(self, client: StorageClient, digest: str, num_layers: int) -> None:
        self._client = client
        self._digest = digest
        self._num_layers = num_layers
        self._dropped: set[bytes] = set()

    def lookup(self, hashes: Sequence[bytes]) -> list[PageRecord]:
        asked = self._before_dropped(hashes)
        contents = self._client.read_prefix([self._name(page_hash) for page_hash in asked])
        records = []
        for page_hash, content in zip(asked, contents, strict=False):
            record = self._decode(content, page_hash)
            if record is None:
                break
            records.append(record)
        return records

    def commit(self, records: Sequence[PageRecord]) -> None:
        contents = [encode_record(record, self._digest) for record in records]
        self._client.write_many(
            [self._name(record.page_hash) for record in records],
            [len(content).to_bytes(LENGTH_BYTES, "little") + content for content in contents],
        )
        self._dropped.difference_update(record.page_hash for record in records)

    def drop(self, page_hash: bytes) -> None:
        self._dropped.add(page_hash)

    def clear(self) -> int:
        """0: backends do not say how many pages they had."""
        self._client.clear()
        self._dropped.clear()
        return 0

    def tend(self) -> float:
        return NEVER_S

    def _name(self, page_hash: bytes) -> str:
        return f"{page_hash.hex()}_{self._digest}_R"

    def _before_dropped(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        for index, page_hash in enumerate(hashes):
            if page_hash in self._dropped:
                return hashes[:index]
        return hashes

    def _decode(self, content: bytes, page_hash: bytes) -> PageRecord | None:
        length = int.from_bytes(content[:LENGTH_BYTES], "little")
        data = content[LENGTH_BYTES : LENGTH_BYTES + length]
        record = decode_record(data, self._digest, page_hash)
        return record if record is not None and len(record.sizes) == self._num_layers else None
