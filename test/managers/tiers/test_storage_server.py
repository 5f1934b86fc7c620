"""A storage process's clients have chunks of their own, and a fault of one costs no other."""

import mmap
import os
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.store_files import DIGEST

from sgl_pipeline.errors import BrokenObject, StoreError
from sgl_pipeline.kv_store.storage_client import StorageClient
from sgl_pipeline.managers.tiers.storage_server import StorageServer, StorageSettings

CHUNK_BYTES = mmap.PAGESIZE
MAX_CLIENTS, CHUNKS_EACH = 2, 3


class StoredBytes:
    """A backend that keeps chunks in a dictionary."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.objects: dict[str, bytes] = {}
        self.is_ill = False
        self.may_go = threading.Event()
        self.may_go.set()

    def set(self, names: tuple[str, ...], first_chunk: int) -> list[bool]:
        self.may_go.wait()
        if self.is_ill:
            raise RuntimeError("the backend is ill")
        for chunk, name in enumerate(names, first_chunk):
            start = chunk * CHUNK_BYTES
            self.objects[name] = self._memory[start : start + CHUNK_BYTES]
        return ["refused" not in name for name in names]

    def get(self, names: tuple[str, ...], first_chunk: int) -> list[bool]:
        """All or none, as nixl does it."""
        if self.count(names) < len(names):
            return [False] * len(names)
        for chunk, name in enumerate(names, first_chunk):
            start = chunk * CHUNK_BYTES
            self._memory[start : start + CHUNK_BYTES] = self.objects[name]
        return [True] * len(names)

    def count(self, names: tuple[str, ...]) -> int:
        missing = (index for index, name in enumerate(names) if name not in self.objects)
        return next(missing, len(names))

    def clear(self) -> None:
        self.objects.clear()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[StoredBytes, str]]:
    size = CHUNK_BYTES * MAX_CLIENTS * CHUNKS_EACH
    memory = os.memfd_create("staging")
    os.ftruncate(memory, size)
    storage = StoredBytes(mmap.mmap(memory, size))
    address = str(tmp_path / "storage")
    Path(address).touch()  # of a process before
    settings = StorageSettings(
        address=address,
        backend="",
        extra_config={},
        digest=DIGEST,
        object_bytes=1,
        max_clients=MAX_CLIENTS,
        chunks_each=CHUNKS_EACH,
    )
    server = StorageServer(settings, storage, memory, CHUNK_BYTES)
    threading.Thread(target=server.serve, daemon=True).start()
    yield storage, address
    os.close(memory)


def test_objects_are_padded_with_zeros(served: tuple[StoredBytes, str]) -> None:
    storage, address = served
    client = StorageClient(address)
    client.write("long", [b"x" * CHUNK_BYTES])
    assert client.write("short", [memoryview(bytearray(b"abc"))]) == [zlib.crc32(b"abc")]
    assert storage.objects["short"] == b"abc".ljust(CHUNK_BYTES, b"\0")
    client.close()


def test_many_objects_go_in_batches(served: tuple[StoredBytes, str]) -> None:
    _, address = served
    client = StorageClient(address)
    names = [f"name {number}" for number in range(1200)]
    client.write_many(names, [name.encode() for name in names])
    found = client.read_prefix([*names, "other", "name 1"])
    assert [content.rstrip(b"\0").decode() for content in found] == names
    assert client.read_prefix(["other", *names]) == client.read_prefix([]) == []
    with pytest.raises(StoreError, match="did not take"):
        client.write_many(["refused"], [b""])
    client.clear()
    assert client.read_prefix(names) == []
    client.close()


def test_a_failing_backend_fails_the_transfer_alone(served: tuple[StoredBytes, str]) -> None:
    storage, address = served
    client = StorageClient(address)
    storage.is_ill = True
    with pytest.raises(StoreError, match="RuntimeError: the backend is ill"):
        client.write("name", [b"x"])
    storage.is_ill = False
    client.write("name", [b"x"])
    with pytest.raises(BrokenObject, match="missing"):
        client.read_into("other", [bytearray(1)], [0], 1)
    client.close()


def test_a_slow_transfer_keeps_its_chunks_from_others(served: tuple[StoredBytes, str]) -> None:
    storage, address = served
    storage.may_go.clear()
    slow = StorageClient(address, timeout_s=0.1)
    with pytest.raises(StoreError, match="timed out"):
        slow.write("slow", [b"s" * CHUNK_BYTES])
    other, third = StorageClient(address), StorageClient(address)
    assert other.read_prefix(["name"]) == []
    with pytest.raises(StoreError, match="2 clients"):
        third.read_prefix(["name"])
    storage.may_go.set()
    while True:
        try:
            third.write("name", [b"x"])
            break
        except StoreError:
            time.sleep(0.01)
    assert storage.objects["slow"] == b"s" * CHUNK_BYTES
    other.close()
    third.close()


def test_no_process_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"{tmp_path}.* does not answer"):
        StorageClient(str(tmp_path / "none")).write("name", [b"x"])
