"""Two servers on one folder under random operations and faults, against a dictionary; a writer
killed at any moment; a thousand pages."""

import errno
import os
import random
import time
from multiprocessing import get_context
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

from sgl_pipeline.errors import BrokenObject, StoreFull
from sgl_pipeline.kv_store import atomic_files
from sgl_pipeline.kv_store.disk_guard import PAUSE_S
from sgl_pipeline.kv_store.folder_bounds import StoreBounds

NUM_PAGES = 12


class Machine:
    """Pages that `expected` has are found whole, unless a fault or the bound took them; nothing
    that was never committed, and nothing spoiled, is ever given back."""

    def __init__(self, path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.path = path
        self.monkeypatch = monkeypatch
        self.now_s = time.time()
        self.limit = self.random.choice([None, 5 * 96 * NUM_LAYERS])
        self.servers = [self.start(), self.start()]
        self.expected: set[int] = set()
        self.may_be_there: set[int] = set()

    def start(self):  # type: ignore[no-untyped-def]
        bounds = StoreBounds(max_bytes=self.limit, min_free_bytes=0)
        return open_store(self.path, bounds=bounds, clock=lambda: self.now_s)

    def run(self, num_operations: int) -> None:
        operations = (
            *(self.save, self.save, self.save, self.look_up, self.look_up, self.drop, self.spoil),
            *(self.remove, self.clear, self.restart, self.tend, self.fill_disk, self.lose_save),
        )
        for _ in range(num_operations):
            self.random.choice(operations)()
            self.now_s += self.random.choice([0, 1, 100])
        self.look_up()

    def server(self):  # type: ignore[no-untyped-def]
        return self.random.choice(self.servers)

    def page(self) -> int:
        return self.random.randrange(NUM_PAGES)

    def save(self) -> None:
        """As one of several splits does."""
        number = self.page()
        cuts = self.random.choice([(), (0,), (0, 1), (0, 2)])
        save_page(*self.server(), number, cuts=cuts)
        self.expected.add(number)
        self.may_be_there.add(number)

    def lose_save(self) -> None:
        """All objects, no record."""
        write_objects(self.server()[1], self.page())

    def look_up(self) -> None:
        for number in range(NUM_PAGES):
            store, objects = self.server()
            found = store.lookup([page_hash(number)])
            if not found:
                assert self.limit is not None or number not in self.expected
                continue
            assert number in self.may_be_there
            try:
                assert read_page(objects, found[0]) == contents_of(number)
            except BrokenObject:
                assert number not in self.expected
                store.drop(page_hash(number))
                self.forget(number)

    def drop(self) -> None:
        number = self.page()
        self.server()[0].drop(page_hash(number))
        self.forget(number)

    def forget(self, number: int) -> None:
        self.expected.discard(number)
        self.may_be_there.discard(number)

    def clear(self) -> None:
        self.server()[0].clear()
        self.expected.clear()
        self.may_be_there.clear()

    def restart(self) -> None:
        self.servers[self.random.randrange(2)] = self.start()

    def tend(self) -> None:
        tend_until_idle(self.server()[0])

    def files_of(self, number: int) -> list[Path]:
        record = self.path / "records" / DIGEST / page_hash(number).hex()
        return [record, *sorted(self.path.glob(f"{page_hash(number).hex()}_*.bin"))]

    def spoil(self) -> None:
        """Truncates or flips a file."""
        number = self.page()
        file = self.random.choice(self.files_of(number))
        if file.exists():
            data = bytearray(file.read_bytes())
            if data and self.random.random() < 0.5:
                data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            else:
                del data[self.random.randrange(len(data) + 1) :]
                data = data[:-1]
            file.write_bytes(data)
            self.expected.discard(number)

    def remove(self) -> None:
        number = self.page()
        self.random.choice(self.files_of(number)).unlink(missing_ok=True)
        self.expected.discard(number)

    def fill_disk(self) -> None:
        """A save of whose writes one fails; then none goes through for a while."""
        number, good_writes = self.page(), self.random.randrange(NUM_LAYERS)
        store, objects = self.server()
        writev = os.writev

        def write_until_full(file, buffers):  # type: ignore[no-untyped-def]
            nonlocal good_writes
            good_writes -= 1
            if good_writes < 0:
                raise OSError(errno.ENOSPC, "full")
            return writev(file, buffers)

        with self.monkeypatch.context() as patch:
            patch.setattr(atomic_files.os, "writev", write_until_full)
            with pytest.raises(StoreFull):
                save_page(store, objects, number, cuts=())
        with pytest.raises(StoreFull):
            save_page(store, objects, number)
        self.now_s += PAUSE_S


@pytest.mark.parametrize("seed", range(40))
def test_random_operations(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(tmp_path, seed, monkeypatch).run(60)


SAVED = (0, 1, 0)
KILLED = 9  # the exit code


def save_until_killed(path: Path, num_calls: int) -> None:
    """Saves pages, the first once more, and ends at the system call behind `num_calls` of those
    that change the folder; where that writes, it has written half."""
    store, objects = open_store(path)
    left = iter(range(num_calls))

    def kills(call):  # type: ignore[no-untyped-def]
        def made(*args, **kwargs):  # type: ignore[no-untyped-def]
            if next(left, None) is None:
                if call is os_writev:
                    content = b"".join(args[1])
                    write(args[0], content[: len(content) // 2])
                os._exit(KILLED)
            return call(*args, **kwargs)

        return made

    os_writev, write = os.writev, os.write
    for name in ("open", "write", "writev", "replace", "rename", "link", "unlink"):
        setattr(os, name, kills(getattr(os, name)))
    for number in SAVED:
        save_page(store, objects, number)


@pytest.mark.multiproc
def test_a_writer_killed_at_any_call_leaves_whole_pages_alone(tmp_path: Path) -> None:
    num_found, exit_code = [0], KILLED
    while exit_code == KILLED:
        path = tmp_path / str(len(num_found))
        writer = get_context("fork").Process(
            target=save_until_killed, args=(path, len(num_found) - 1)
        )
        writer.start()
        writer.join()
        exit_code = writer.exitcode
        store, objects = open_store(path)
        found = store.lookup([page_hash(number) for number in SAVED[:2]])
        for number, record in enumerate(found):
            assert read_page(objects, record) == contents_of(number)
        tend_until_idle(store)
        num_found.append(len(found))
    # No page goes while it is saved again.
    assert exit_code == 0 and num_found == sorted(num_found) and {*num_found} == {0, 1, 2}


def test_a_thousand_pages(tmp_path: Path) -> None:
    store, objects = open_store(tmp_path, bounds=StoreBounds(min_free_bytes=0, max_files=800 * 3))
    hashes = [page_hash(number) for number in range(1000)]
    for number in range(1000):
        save_page(store, objects, number)
    assert len(open_store(tmp_path)[0].lookup(hashes)) == 1000
    tend_until_idle(store)
    assert sum(len(store.lookup([one])) for one in hashes) == 800
    assert store.clear() == 800
    assert os.listdir(tmp_path) == ["records"]
