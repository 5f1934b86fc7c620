"""Pages in the memory of stages: both sides forget the same ones, and what is gone is missed."""

import logging
import threading
from array import array
from random import Random

import pytest
from support.store_files import DIGEST, page_content, page_hash, read_page

from sgl_pipeline.errors import BrokenObject, ConfigurationError, StoreFull
from sgl_pipeline.kv_store import host_objects
from sgl_pipeline.kv_store.host_objects import MIN_FREE_BYTES, HostObjects
from sgl_pipeline.kv_store.host_pages import PAGES_UNDER_WAY, HostPages, host_page_count
from sgl_pipeline.kv_store.object_names import object_name
from sgl_pipeline.kv_store.open_store import HOST_BACKEND, open_objects, open_pages
from sgl_pipeline.kv_store.page_store import self_test
from sgl_pipeline.page_record import PageRecord
from sgl_pipeline.scheduling.page_saves import PAGES_PER_SAVE, SAVES_AT_A_TIME
from sgl_pipeline.wire.store_orders import StorePlace

SIZES = (96, 160, 96)  # of the objects of three layers
PLENTY = MIN_FREE_BYTES + (1 << 40)


def host_memory(num_pages: int, sizes: tuple[int, ...] = SIZES) -> HostObjects:
    objects = HostObjects(num_pages, lambda: PLENTY)
    objects.make_room(sizes)
    return objects


def write_page(objects: HostObjects, number: int) -> PageRecord:
    numbers = []
    for layer, size in enumerate(SIZES):
        name = object_name(page_hash(number), DIGEST, range(layer, layer + 1))
        numbers += objects.write(name, [page_content(number, layer, size)])
    return PageRecord(page_hash(number), SIZES, array("I", numbers).tobytes())


def is_whole(objects: HostObjects, record: PageRecord, number: int) -> bool:
    try:
        found = read_page(objects, record)
    except BrokenObject:
        return False
    assert found == [page_content(number, layer, size) for layer, size in enumerate(SIZES)]
    return True


def test_an_object_comes_back_until_its_room_is_needed() -> None:
    objects = host_memory(4)
    records = [write_page(objects, number) for number in range(4)]
    assert all(is_whole(objects, records[number], number) for number in (1, 2, 3, 0))
    write_page(objects, 4)
    assert not is_whole(objects, records[1], 1)  # the least recently used
    assert all(is_whole(objects, records[number], number) for number in (0, 2, 3))


def test_an_object_that_was_written_again_is_not_the_earlier_one() -> None:
    objects = host_memory(4)
    earlier, later = write_page(objects, 1), write_page(objects, 1)
    assert not is_whole(objects, earlier, 1)
    assert is_whole(objects, later, 1)


def test_objects_take_no_more_than_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_objects, "CHUNK_BYTES", 1000)
    taken: list[int] = []
    real = host_objects.mmap.mmap
    monkeypatch.setattr(
        host_objects.mmap, "mmap", lambda fd, size, flags: taken.append(size) or real(fd, size)
    )
    objects = host_memory(50)
    for number in range(200):
        write_page(objects, number)
    assert sum(taken) == 50 * sum(SIZES)
    assert max(taken) <= 1000


def test_layers_that_come_bring_room_for_their_pages() -> None:
    objects = host_memory(3, (96,))
    for number in range(3):
        objects.write(f"first {number}", [page_content(number, 0)])
    objects.make_room((96, 96))
    for number in range(3):
        objects.write(f"second {number}", [page_content(number, 0)])
    buffer = bytearray(96)
    objects.read_into("first 0", [buffer], [1], 96)
    assert buffer == page_content(0, 0)


def test_a_host_without_memory_keeps_what_it_has_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_objects, "CHUNK_BYTES", 300)
    left = iter([MIN_FREE_BYTES + 300, MIN_FREE_BYTES + 299])
    objects = HostObjects(100, lambda: next(left))
    with caplog.at_level(logging.WARNING):
        numbers = [objects.write(str(number), [bytes(100)])[0] for number in range(10)]
    assert caplog.text.count("lower --hicache-ratio or --hicache-size") == 1
    buffer = bytearray(100)
    for number in range(7, 10):
        objects.read_into(str(number), [buffer], [numbers[number]], 100)
    with pytest.raises(BrokenObject, match="object 6 is not in host memory any more"):
        objects.read_into("6", [buffer], [numbers[6]], 100)
    with pytest.raises(StoreFull, match="no memory left"):
        HostObjects(100, lambda: 0).write("0", [bytes(100)])


def test_a_deleted_object_gives_its_room_back() -> None:
    objects = host_memory(1, (96,))
    numbers = objects.write("a", [bytes(96)])
    assert objects.delete("a") and objects.delete("a")
    with pytest.raises(BrokenObject):
        objects.read_into("a", [bytearray(96)], numbers, 96)
    objects.write("b", [bytes(96)])


def test_threads_never_see_half_an_object() -> None:
    objects = HostObjects(2, lambda: PLENTY)  # so names take each other's memory
    size, end = 1 << 16, threading.Event()
    wrong: list[object] = []

    def write_all() -> None:
        try:
            for turn in range(300):
                newest[turn % 4] = objects.write(f"{turn % 4}", [bytes([turn % 4]) * size])[0]
        except Exception as error:
            wrong.append(error)
        end.set()

    newest = [0] * 4
    writer = threading.Thread(target=write_all)
    writer.start()
    buffer, num_read = bytearray(size), 0
    while not end.is_set() or not num_read:
        for number in range(4):
            try:
                objects.read_into(f"{number}", [buffer], [newest[number]], size)
            except BrokenObject:
                continue
            num_read += 1
            wrong += [] if buffer == bytes([number]) * size else [number]
    writer.join()
    assert not wrong


@pytest.mark.parametrize(
    ("ratio", "size_bytes", "pages"),
    [(2.0, 0, 2000), (0.5, 0, 500), (2.0, 10**9, 10**9 // 300), (2.0, 299, 0), (0.0009, 0, 0)],
)
def test_the_size_of_host_memory_is_upstreams(ratio: float, size_bytes: int, pages: int) -> None:
    """The stage with the largest pages bounds all: they keep the same number."""
    if pages:
        assert host_page_count(ratio, size_bytes, 1000, [200, 300, 100]) == pages
        return
    knob = "--hicache-size" if size_bytes else "--hicache-ratio"
    with pytest.raises(ConfigurationError, match=f"{knob} leaves no room"):
        host_page_count(ratio, size_bytes, 1000, [200, 300, 100])


def record(number: int) -> PageRecord:
    return PageRecord(page_hash(number), SIZES, bytes(12))


def test_a_lookup_finds_the_prefix_that_is_there() -> None:
    pages = HostPages(200)
    pages.commit([record(number) for number in (1, 2, 4)])
    hashes = [page_hash(number) for number in (1, 2, 3, 4)]
    assert pages.lookup(hashes) == [record(1), record(2)]
    pages.drop(page_hash(1))
    pages.drop(page_hash(1))
    assert pages.lookup(hashes) == []
    assert pages.counts().held_bytes == 2 * sum(SIZES)
    assert pages.clear() == 2
    assert pages.lookup(hashes[1:]) == [] and pages.counts().held_bytes == 0


def test_pages_that_were_used_last_stay() -> None:
    pages = HostPages(PAGES_UNDER_WAY * 3)
    most = PAGES_UNDER_WAY * 2
    pages.commit([record(number) for number in range(most)])
    pages.lookup([page_hash(0)])
    pages.commit([record(most), record(most)])
    assert pages.lookup([page_hash(1)]) == []
    assert pages.lookup([page_hash(0), page_hash(most)]) == [record(0), record(most)]
    assert pages.counts().evicted_pages == 1
    assert pages.counts().held_bytes == most * sum(SIZES)


def test_the_scheduler_keeps_fewer_pages_than_stages_by_those_under_way() -> None:
    assert PAGES_UNDER_WAY == PAGES_PER_SAVE * SAVES_AT_A_TIME


@pytest.mark.parametrize("seed", range(8))
def test_a_page_that_is_found_is_whole_on_every_stage(seed: int) -> None:
    """Saves are written before they are committed, as many at a time as the scheduler orders, and
    what a lookup finds is loaded. Both sides then forget alike, so that no load fails."""
    random = Random(seed)
    num_pages = PAGES_UNDER_WAY * 2 + random.randrange(200)
    stages, pages = [host_memory(num_pages) for _ in range(2)], HostPages(num_pages)
    under_way: list[tuple[int, PageRecord]] = []
    num_found = 0
    for _ in range(5 * num_pages):
        if random.random() < 0.5 and len(under_way) < PAGES_UNDER_WAY:
            number = random.randrange(2 * num_pages)
            saved = [write_page(stage, number) for stage in stages]
            under_way.append((number, saved[0]))
        elif under_way and random.random() < 0.5:
            pages.commit([under_way.pop(0)[1]])
        else:
            number = random.randrange(2 * num_pages)
            if any(number == one for one, _ in under_way):
                continue  # it is in the pool
            for found in pages.lookup([page_hash(number)]):
                num_found += 1
                assert all(is_whole(stage, found, number) for stage in stages)
    assert num_found > 50 and pages.counts().evicted_pages > 50


def test_a_store_of_host_memory_is_opened_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_objects, "MIN_FREE_BYTES", 0)
    place = StorePlace(
        backend=HOST_BACKEND, address="", digest=DIGEST, save_bytes_per_s=1, host_pages=500
    )
    assert isinstance(open_pages(place, 3), HostPages)
    objects = open_objects(place)
    assert isinstance(objects, HostObjects)
    self_test(objects, DIGEST)
