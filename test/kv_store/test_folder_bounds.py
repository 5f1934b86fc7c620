"""A folder stays within its bounds; what is not ours stays in it."""

import os
import time
from pathlib import Path

import pytest
from support.store_files import (
    DIGEST,
    NUM_LAYERS,
    contents_of,
    open_store,
    page_hash,
    read_page,
    save_page,
    tend_until_idle,
    write_objects,
)

from sgl_pipeline.kv_store.folder_bounds import FREE_SHARE, ORPHAN_S, RETRY_S, StoreBounds
from sgl_pipeline.kv_store.store_folder import StoreFolder

OTHER = "ukv1-0123456789abcdef"
PAGE_BYTES = 96 * NUM_LAYERS
PAGE_FILES = 2 + 1  # two objects and a record


def bounds(**changes: int) -> StoreBounds:
    return StoreBounds(**({"min_free_bytes": 0} | changes))


def files_in(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def age(path: Path, seconds: float) -> None:
    when_s = time.time() - seconds
    os.utime(path, (when_s, when_s))


def age_record(path: Path, number: int, seconds: float, digest: str = DIGEST) -> None:
    age(path / "records" / digest / page_hash(number).hex(), seconds)


@pytest.mark.parametrize(
    "limit", [bounds(max_bytes=4 * PAGE_BYTES), bounds(max_files=4 * PAGE_FILES + 1)]
)
def test_the_least_recently_used_go_whatever_their_digest(
    tmp_path: Path, limit: StoreBounds
) -> None:
    store, objects = open_store(tmp_path, bounds=limit)
    other, _ = open_store(tmp_path, bounds=limit, digest=OTHER)
    for number in range(4):
        save_page(store, objects, number)
        age_record(tmp_path, number, 1000 - number)
    save_page(other, objects, 9, OTHER)
    age_record(tmp_path, 9, 2000, OTHER)
    store.lookup([page_hash(0)])
    save_page(store, objects, 4)
    tend_until_idle(store)
    assert other.lookup([page_hash(9)]) == []
    kept = [number for number in range(5) if store.lookup([page_hash(number)])]
    assert kept == [0, 2, 3, 4]
    assert all(
        read_page(objects, *store.lookup([page_hash(number)])) == contents_of(number)
        for number in kept
    )
    assert len(files_in(tmp_path)) == 4 * PAGE_FILES + 1
    assert store.counts() == (4 * PAGE_BYTES, 4 * PAGE_FILES, 2)


def test_a_page_that_was_used_since_the_scan_stays(tmp_path: Path) -> None:
    store, objects = open_store(tmp_path, bounds=bounds(max_bytes=4 * PAGE_BYTES))
    for number in range(4):
        save_page(store, objects, number)
        age_record(tmp_path, number, 1000 - number)
    tend_until_idle(store)  # scans: page 0 is the oldest
    store.lookup([page_hash(0)])
    save_page(store, objects, 4)
    tend_until_idle(store)
    assert [number for number in range(5) if store.lookup([page_hash(number)])] == [0, 2, 3, 4]


def test_a_small_store_keeps_its_bound_under_steady_saves(tmp_path: Path) -> None:
    store, objects = open_store(tmp_path, bounds=bounds(max_bytes=5 * PAGE_BYTES))
    tend_until_idle(store)
    for number in range(100):
        save_page(store, objects, number)
        if number % 5 == 4:
            tend_until_idle(store)
            assert len(files_in(tmp_path)) == 5 * PAGE_FILES + 1
    assert store.counts().evicted_pages == 95


def test_without_a_bound_it_is_a_share_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"bytes": 1000 * PAGE_BYTES}
    monkeypatch.setattr(StoreFolder, "free_bytes", lambda folder: free["bytes"])
    store, objects = open_store(tmp_path, bounds=bounds(min_free_bytes=100))
    for number in range(3):
        save_page(store, objects, number)
    free["bytes"] = 2 * PAGE_BYTES
    tend_until_idle(store)
    assert store.counts().evicted_pages == 0  # int(FREE_SHARE * 5) pages are allowed
    for number in range(3, 6):
        save_page(store, objects, number)
    tend_until_idle(store)
    assert store.counts().held_bytes == int(FREE_SHARE * 5) * PAGE_BYTES


def test_a_disk_that_others_fill_costs_the_store_and_no_endless_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    store, objects = open_store(
        tmp_path, bounds=bounds(max_bytes=1 << 30, min_free_bytes=100), clock=lambda: now_s
    )
    save_page(store, objects, 1)
    monkeypatch.setattr(StoreFolder, "free_bytes", lambda folder: 99)
    tend_until_idle(store)
    assert files_in(tmp_path) == {"records/format.json"}
    assert 0 < store.tend() <= RETRY_S


def test_leftovers_of_killed_servers_go_when_they_are_old(tmp_path: Path) -> None:
    store, objects = open_store(tmp_path)
    save_page(store, objects, 1)
    for number in (2, 3):
        write_objects(objects, number)
    drafts = [f".{digit * 32}.sgl_pipeline.tmp" for digit in "ab"]
    for folder in (tmp_path, tmp_path / "records" / DIGEST):
        for name in drafts:
            (folder / name).touch()
        age(folder / drafts[0], ORPHAN_S + 10)
    foreign = {"notes.txt", "x_L0-1_H0.bin", ".other.tmp", f"{page_hash(1).hex()}_m_0_1.bin"}
    for name in foreign:
        (tmp_path / name).touch()
        age(tmp_path / name, 10 * ORPHAN_S)
    for file in tmp_path.glob(f"{page_hash(2).hex()}_*"):
        age(file, ORPHAN_S + 10)
    for file in tmp_path.glob(f"{page_hash(1).hex()}_{DIGEST}*"):
        age(file, ORPHAN_S + 10)
    before = files_in(tmp_path)
    tend_until_idle(store)
    gone = before - files_in(tmp_path)
    assert gone == {
        drafts[0],
        f"records/{DIGEST}/{drafts[0]}",
        *(name for name in before if name.startswith(f"{page_hash(2).hex()}_")),
    }


def objects_of(path: Path, number: int) -> set[str]:
    """The layers in the names of a page's objects."""
    names = (file.name for file in path.glob(f"{page_hash(number).hex()}_{DIGEST}_*.bin"))
    return {name.split("_")[2] for name in names}


def age_objects(path: Path, number: int) -> None:
    for file in path.glob(f"{page_hash(number).hex()}_{DIGEST}_*.bin"):
        age(file, ORPHAN_S + 10)


def test_objects_that_a_newer_record_does_not_name_go_when_they_are_old(tmp_path: Path) -> None:
    """Another server, of another split, has saved the page too."""
    store, objects = open_store(tmp_path)
    save_page(store, objects, 1, cuts=(0, 1))
    save_page(store, objects, 2, cuts=(0,))
    for number in (1, 2):
        age_objects(tmp_path, number)
    save_page(store, objects, 1, cuts=(0, 1, 2))
    save_page(store, objects, 3, cuts=(0,))
    save_page(store, objects, 3, cuts=())
    tend_until_idle(store)
    assert objects_of(tmp_path, 1) == {"L0-1", "L1-2", "L2-3"}
    assert objects_of(tmp_path, 2) == {"L0-3"}
    # A load may still read it.
    assert objects_of(tmp_path, 3) == {"L0-3", "L0-1", "L1-2", "L2-3"}
    hashes = [page_hash(number) for number in (1, 2, 3)]
    assert [read_page(objects, record) for record in store.lookup(hashes)] == [
        contents_of(number) for number in (1, 2, 3)
    ]


def test_objects_of_a_record_that_is_newer_than_the_scan_stay(tmp_path: Path) -> None:
    store, objects = open_store(tmp_path)
    save_page(store, objects, 1, cuts=(0, 1))
    store.tend()
    store.tend()  # the scan has seen the record
    save_page(store, objects, 1, cuts=(0, 2))
    age_objects(tmp_path, 1)
    tend_until_idle(store)
    assert objects_of(tmp_path, 1) >= {"L0-2", "L2-3"}
    assert read_page(objects, *store.lookup([page_hash(1)])) == contents_of(1)


def test_objects_of_a_damaged_record_go_when_they_are_old(tmp_path: Path) -> None:
    store, objects = open_store(tmp_path)
    for number in (1, 2):
        save_page(store, objects, number)
        (tmp_path / "records" / DIGEST / page_hash(number).hex()).write_bytes(b"damaged")
    age_objects(tmp_path, 1)
    store.drop(page_hash(1))
    tend_until_idle(store)
    assert objects_of(tmp_path, 1) == set()
    assert objects_of(tmp_path, 2) == {"L0-1", "L1-3"}


@pytest.mark.parametrize("cuts", [(), (0,), (0, 2)])
def test_a_page_goes_with_all_its_objects_however_it_is_cut(
    tmp_path: Path, cuts: tuple[int, ...]
) -> None:
    limit = bounds(max_bytes=PAGE_BYTES)
    store, objects = open_store(tmp_path, bounds=limit)
    save_page(store, objects, 1, cuts=cuts)
    num_files = len(cuts or range(NUM_LAYERS)) + 1
    assert store.counts() == (PAGE_BYTES, num_files, 0)
    tend_until_idle(store)
    assert store.counts() == (PAGE_BYTES, num_files, 0)
    age_record(tmp_path, 1, 100)
    store, objects = open_store(tmp_path, bounds=limit)
    save_page(store, objects, 2, cuts=(0, 1))
    tend_until_idle(store)
    assert store.counts() == (PAGE_BYTES, PAGE_FILES, 1)
    assert objects_of(tmp_path, 1) == set()
    store.drop(page_hash(2))
    assert files_in(tmp_path) == {"records/format.json"}


def test_damaged_records_go(tmp_path: Path) -> None:
    store, objects = open_store(tmp_path)
    save_page(store, objects, 1)
    file = tmp_path / "records" / DIGEST / page_hash(1).hex()
    file.write_bytes(b"damaged")
    tend_until_idle(store)
    assert not file.exists()


def test_clear_removes_this_digest_alone(tmp_path: Path) -> None:
    store, objects = open_store(tmp_path)
    other, _ = open_store(tmp_path, digest=OTHER)
    save_page(other, objects, 1, OTHER)
    (tmp_path / "notes.txt").touch()
    kept = files_in(tmp_path)
    for number in range(3):
        save_page(store, objects, number)
    write_objects(objects, 7)
    assert store.clear() == 3
    assert files_in(tmp_path) == kept
    assert store.clear() == 0
    tend_until_idle(store)
    assert store.counts()[:2] == (PAGE_BYTES, PAGE_FILES)


def test_a_dropped_page_is_gone(tmp_path: Path) -> None:
    store, objects = open_store(tmp_path)
    before = files_in(tmp_path)
    save_page(store, objects, 1)
    store.drop(page_hash(1))
    store.drop(page_hash(2))
    assert files_in(tmp_path) == before


def test_evicting_survives_that_another_server_evicts(tmp_path: Path) -> None:
    limit = bounds(max_bytes=2 * PAGE_BYTES)
    store, objects = open_store(tmp_path, bounds=limit)
    for number in range(6):
        save_page(store, objects, number)
        age_record(tmp_path, number, 100 - number)
    store.tend()
    rival, _ = open_store(tmp_path, bounds=limit)
    tend_until_idle(rival)
    tend_until_idle(store)
    assert [number for number in range(6) if store.lookup([page_hash(number)])] == [4, 5]
