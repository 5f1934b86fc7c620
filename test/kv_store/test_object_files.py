"""Objects come back as they were written, or a named error says why not."""

import errno
import os
import shutil
import zlib
from itertools import pairwise
from pathlib import Path

import pytest

from sgl_pipeline.errors import BrokenObject, StoreError, StoreFull
from sgl_pipeline.kv_store import atomic_files, object_files
from sgl_pipeline.kv_store.disk_guard import PAUSE_S, DiskGuard
from sgl_pipeline.kv_store.object_files import ObjectFiles
from sgl_pipeline.kv_store.page_store import self_test
from sgl_pipeline.kv_store.store_folder import open_folder

CONTENT = bytes(range(256)) * 3
BOUNDS = (0, 10, 300, 768)  # of its parts
CHECKSUMS = [zlib.crc32(CONTENT[first:end]) for first, end in pairwise(BOUNDS)]


def objects_in(path: Path) -> ObjectFiles:
    folder = open_folder(path)
    return ObjectFiles(folder, DiskGuard(folder, min_free_bytes=0))


def write(objects: ObjectFiles) -> list[int]:
    """The checksums of an object of three parts."""
    return objects.write(
        "name", [CONTENT[:10], memoryview(bytearray(CONTENT[10:300])), CONTENT[300:]]
    )


def read(objects: ObjectFiles, first: int, end: int) -> list[bytes]:
    """Some of its parts."""
    parts = [bytearray(stop - start) for start, stop in pairwise(BOUNDS[first : end + 1])]
    objects.read_into("name", parts, CHECKSUMS[first:end], 768, BOUNDS[first])
    return [*map(bytes, parts)]


def test_an_object_comes_back(tmp_path: Path) -> None:
    objects = objects_in(tmp_path)
    assert write(objects) == CHECKSUMS
    file = tmp_path / "name.bin"
    assert file.read_bytes() == CONTENT and file.stat().st_mode & 0o777 == 0o600
    assert {entry.name for entry in tmp_path.iterdir()} == {"name.bin", "records"}
    assert read(objects, 0, 3) == [CONTENT[:10], CONTENT[10:300], CONTENT[300:]]


@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)])
def test_some_parts_of_an_object_can_be_read(tmp_path: Path, first: int, end: int) -> None:
    objects = objects_in(tmp_path)
    write(objects)
    assert b"".join(read(objects, first, end)) == CONTENT[BOUNDS[first] : BOUNDS[end]]


def test_bytes_of_another_place_are_noticed(tmp_path: Path) -> None:
    objects = objects_in(tmp_path)
    write(objects)
    for offset in (0, 9, 11, 700, 10_000):
        with pytest.raises(BrokenObject, match="altered"):
            objects.read_into("name", [bytearray(290)], CHECKSUMS[1:2], 768, offset)


def test_however_little_the_kernel_takes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = objects_in(tmp_path)
    write = os.write
    monkeypatch.setattr(
        atomic_files.os, "writev", lambda file, left: write(file, bytes(left[0])[:7])
    )
    objects.write("name", [CONTENT[:10], b"", CONTENT[10:]])
    assert (tmp_path / "name.bin").read_bytes() == CONTENT
    preadv = os.preadv
    monkeypatch.setattr(
        object_files.os,
        "preadv",
        lambda file, left, offset: preadv(file, [memoryview(left[0])[:7]], offset),
    )
    assert read(objects, 1, 3) == [CONTENT[10:300], CONTENT[300:]]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, "missing"),
        (b"", "0 bytes"),
        (CONTENT[:-1], "767 bytes"),
        (CONTENT + b"x", "769 bytes"),
        (b"x" + CONTENT[1:], "altered"),
    ],
)
def test_a_spoiled_object_is_noticed(tmp_path: Path, found: bytes | None, reason: str) -> None:
    objects = objects_in(tmp_path)
    if found is not None:
        (tmp_path / "name.bin").write_bytes(found)
    with pytest.raises(BrokenObject, match=f"name .*{reason}"):
        read(objects, 0, 3)


@pytest.mark.parametrize(("found", "reason"), [(CONTENT[:-1], "767"), (CONTENT + b"x", "769")])
def test_the_size_of_an_object_counts_whatever_part_of_it_is_read(
    tmp_path: Path, found: bytes, reason: str
) -> None:
    objects = objects_in(tmp_path)
    (tmp_path / "name.bin").write_bytes(found)
    with pytest.raises(BrokenObject, match=f"name has {reason} bytes, 768 were written"):
        read(objects, 0, 1)


def test_a_disk_that_fills_turns_saving_off_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 5.0
    folder = open_folder(tmp_path)
    objects = ObjectFiles(folder, DiskGuard(folder, min_free_bytes=0, clock=lambda: now_s))

    def fail(file: int, buffers: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files.os, "writev", fail)
        with pytest.raises(StoreFull, match=str(tmp_path)):
            objects.write("name", [CONTENT])
    now_s += PAUSE_S - 1
    for _ in range(3):
        with pytest.raises(StoreFull, match="off for 1 s"):
            objects.write("name", [CONTENT])
    assert len(caplog.records) == 1
    now_s += 1
    objects.write("name", [CONTENT])
    assert {entry.name for entry in tmp_path.iterdir()} == {"name.bin", "records"}


def test_the_least_free_space_is_kept(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    objects = ObjectFiles(folder, DiskGuard(folder, min_free_bytes=1 << 60))
    with pytest.raises(StoreFull, match="MiB are free"):
        objects.write("name", [CONTENT])


def test_a_folder_that_vanished_is_a_named_error(tmp_path: Path) -> None:
    objects = objects_in(tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(StoreError, match="cannot be written"):
        objects.write("name", [CONTENT])


def test_the_self_test_leaves_nothing(tmp_path: Path) -> None:
    self_test(objects_in(tmp_path), "ukv1-0123456789abcdef")
    assert os.listdir(tmp_path) == ["records"]


@pytest.mark.parametrize("fault", ["loses", "alters", "keeps"])
def test_the_self_test_notices_a_store_that(tmp_path: Path, fault: str) -> None:
    class Faulty(ObjectFiles):
        def write(self, name, parts):  # type: ignore[no-untyped-def]
            result = super().write(name, parts)
            if fault == "loses":
                super().delete(name)
            return result

        def read_into(self, name, parts, *given):  # type: ignore[no-untyped-def]
            super().read_into(name, parts, *given)
            if fault == "alters":
                parts[-1][0] ^= 1

        def delete(self, name: str) -> bool:
            return fault == "keeps" or super().delete(name)

    folder = open_folder(tmp_path)
    with pytest.raises(StoreError):
        self_test(Faulty(folder, DiskGuard(folder, min_free_bytes=0)), "ukv1-0123456789abcdef")
