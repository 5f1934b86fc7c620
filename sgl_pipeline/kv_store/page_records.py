"""Records of pages: bytes in a store, and files in a folder. A record is written after the page's
objects and removed before them, so it says that the page is there."""

import os
import time
import zlib
from collections.abc import Callable, Sequence

import msgspec

from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import MalformedData
from sgl_pipeline.kv_store.atomic_files import remove_file, write_atomically
from sgl_pipeline.kv_store.store_folder import StoreFolder
from sgl_pipeline.object_layers import are_cuts
from sgl_pipeline.page_record import PageRecord

CHECKSUM_BYTES = 4
# A record longer than this is not one: 1,000 layers take 9,000 bytes.
MAX_RECORD_BYTES = 1 << 16
# A file whose last use is newer is not touched again.
TOUCH_S = 60.0

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PageRecord)


def encode_record(record: PageRecord, digest: str) -> bytes:
    """msgpack behind its CRC-32, in which the digest counts; no record of another one passes."""
    payload = _encoder.encode(record)
    return _checksum(payload, digest).to_bytes(CHECKSUM_BYTES, "little") + payload


def decode_record(data: bytes, digest: str, page_hash: bytes) -> PageRecord | None:
    """The record of a page; None where `data` is damaged or of another page or digest."""
    payload = data[CHECKSUM_BYTES:]
    if _checksum(payload, digest) != int.from_bytes(data[:CHECKSUM_BYTES], "little"):
        return None
    try:
        record = decode(_decoder, payload)
    except MalformedData:
        return None
    num_layers = len(record.sizes)
    fits = len(record.checksums) == 4 * num_layers and are_cuts(record.cuts, num_layers)
    return record if fits and record.page_hash == page_hash else None


def read_record(path: str, digest: str, page_hash: bytes) -> PageRecord | None:
    """The record in a file, which does not count as a use of it; None where it is damaged. Raises
    OSError."""
    with open(path, "rb") as file:
        return decode_record(file.read(MAX_RECORD_BYTES), digest, page_hash)


def _checksum(payload: bytes, digest: str) -> int:
    return zlib.crc32(payload, zlib.crc32(digest.encode()))


class RecordFiles:
    """The records of one digest in a folder. The file system is the index."""

    def __init__(
        self,
        folder: StoreFolder,
        digest: str,
        num_layers: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = folder.records_of(digest)
        self._digest = digest
        self._num_layers = num_layers
        self._clock = clock

    def lookup(self, hashes: Sequence[bytes]) -> list[PageRecord]:
        """The records of the pages up to the first that is missing, damaged or has another number
        of layers. This counts as a use of them."""
        records = []
        now_ns = int(self._clock() * 1e9)
        for index, page_hash in enumerate(hashes):
            # A page is older than the one before it, so that the end of a prefix is evicted first.
            record = self._read(page_hash, now_ns - 1000 * index)
            if record is None:
                break
            records.append(record)
        return records

    def write(self, records: Sequence[PageRecord]) -> None:
        """Commits pages whose objects are all written. Raises OSError."""
        os.makedirs(self._path, mode=0o700, exist_ok=True)
        for record in records:
            data = encode_record(record, self._digest)
            write_atomically(self._path, record.page_hash.hex(), [data])

    def take(self, page_hash: bytes) -> PageRecord | None:
        """Removes the record of a page, and gives it; None where there was none, or a damaged one.
        Raises OSError where it cannot be removed."""
        path = f"{self._path}/{page_hash.hex()}"
        try:
            record = read_record(path, self._digest, page_hash)
        except FileNotFoundError:
            return None
        remove_file(path)
        return record

    def _read(self, page_hash: bytes, used_ns: int) -> PageRecord | None:
        try:
            file = os.open(f"{self._path}/{page_hash.hex()}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            record = decode_record(os.read(file, MAX_RECORD_BYTES), self._digest, page_hash)
            if record is None or len(record.sizes) != self._num_layers:
                return None
            if used_ns - os.fstat(file).st_mtime_ns > TOUCH_S * 1e9:
                os.utime(file, ns=(used_ns, used_ns))
            return record
        except OSError:
            return None
        finally:
            os.close(file)
