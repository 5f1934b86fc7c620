"""A page is found by its record, if that is whole and of this key space."""

import os
import zlib
from pathlib import Path

import msgspec
import pytest
from support.store_files import (
    DIGEST,
    NUM_LAYERS,
    contents_of,
    open_store,
    page_hash,
    read_page,
    save_page,
    write_objects,
)

from sgl_pipeline.kv_store.page_records import TOUCH_S, RecordFiles, decode_record, encode_record
from sgl_pipeline.kv_store.store_folder import open_folder
from sgl_pipeline.page_record import PageRecord

RECORD = PageRecord(page_hash(1), (96,) * NUM_LAYERS, bytes(range(4 * NUM_LAYERS)))


def record_file(path: Path, number: int) -> Path:
    return path / "records" / DIGEST / page_hash(number).hex()


def test_any_changed_byte_is_noticed() -> None:
    data = encode_record(RECORD, DIGEST)
    assert decode_record(data, DIGEST, page_hash(1)) == RECORD
    for index in range(len(data)):
        spoiled = data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
        assert decode_record(spoiled, DIGEST, page_hash(1)) is None
        assert decode_record(data[:index], DIGEST, page_hash(1)) is None


def test_a_record_without_cuts_is_of_a_page_with_an_object_for_each_layer(tmp_path: Path) -> None:
    """As servers wrote them before objects had several layers."""
    store, objects = open_store(tmp_path)
    written = write_objects(objects, 1, cuts=())
    payload = msgspec.msgpack.encode((written.page_hash, written.sizes, written.checksums))
    checksum = zlib.crc32(payload, zlib.crc32(DIGEST.encode()))
    store.commit([written])
    record_file(tmp_path, 1).write_bytes(checksum.to_bytes(4, "little") + payload)
    (record,) = store.lookup([page_hash(1)])
    assert record == written and record.objects == (range(1), range(1, 2), range(2, 3))
    assert read_page(objects, record) == contents_of(1)


@pytest.mark.parametrize("cuts", [(), (0,), (0, 1), (0, 2), (0, 1, 2)])
def test_a_record_says_which_layers_share_an_object(cuts: tuple[int, ...]) -> None:
    record = msgspec.structs.replace(RECORD, cuts=cuts)
    assert decode_record(encode_record(record, DIGEST), DIGEST, page_hash(1)) == record


@pytest.mark.parametrize(
    "record",
    [
        PageRecord(page_hash(1), (96,), b"123"),
        PageRecord(page_hash(1), (), b"1234"),
        *(msgspec.structs.replace(RECORD, cuts=cuts) for cuts in ((1,), (0, 0), (0, 2, 1), (0, 3))),
    ],
)
def test_a_record_that_contradicts_itself_is_none(record: PageRecord) -> None:
    assert decode_record(encode_record(record, DIGEST), DIGEST, page_hash(1)) is None


def test_the_longest_prefix_is_found(tmp_path: Path) -> None:
    store, objects = open_store(tmp_path)
    for number in (0, 1, 2, 4):
        save_page(store, objects, number)
    found = store.lookup([page_hash(number) for number in range(5)])
    assert [record.page_hash for record in found] == [page_hash(number) for number in range(3)]
    assert store.lookup([]) == store.lookup([page_hash(3)]) == []


def test_a_record_of_another_page_digest_or_depth_is_missing(tmp_path: Path) -> None:
    store, objects = open_store(tmp_path)
    save_page(store, objects, 1)
    folder, other = open_folder(tmp_path), DIGEST[:-1] + ("0" if DIGEST[-1] != "0" else "1")
    assert RecordFiles(folder, DIGEST, NUM_LAYERS + 1).lookup([page_hash(1)]) == []
    os.link(record_file(tmp_path, 1), record_file(tmp_path, 2))
    assert store.lookup([page_hash(2)]) == []
    (tmp_path / "records" / other).mkdir()
    os.link(record_file(tmp_path, 1), tmp_path / "records" / other / page_hash(1).hex())
    assert RecordFiles(folder, other, NUM_LAYERS).lookup([page_hash(1)]) == []
    assert store.lookup([page_hash(1)])


def test_a_lookup_is_a_use_later_pages_a_little_older(tmp_path: Path) -> None:
    now_s = os.stat(tmp_path).st_mtime
    store, objects = open_store(tmp_path, clock=lambda: now_s)
    for number in range(3):
        save_page(store, objects, number)
    now_s += TOUCH_S + 100
    store.lookup([page_hash(number) for number in range(3)])
    times = [record_file(tmp_path, number).stat().st_mtime_ns for number in range(3)]
    assert times == sorted(times, reverse=True)
    assert abs(times[-1] - now_s * 1e9) < 1e6
    now_s += TOUCH_S / 2
    store.lookup([page_hash(0)])
    assert record_file(tmp_path, 0).stat().st_mtime_ns == times[0]


def test_records_are_for_their_owner_alone(tmp_path: Path) -> None:
    save_page(*open_store(tmp_path), 1)
    assert record_file(tmp_path, 1).stat().st_mode & 0o777 == 0o600
    assert record_file(tmp_path, 1).parent.stat().st_mode & 0o777 == 0o700
