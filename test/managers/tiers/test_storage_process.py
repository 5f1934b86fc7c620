"""SGLang's storage backends, unmodified, behind the storage process keep pages for all clients."""

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.ports import number_of, reserve_port
from support.store_files import (
    DIGEST,
    NUM_LAYERS,
    contents_of,
    page_hash,
    read_page,
    save_page,
    write_objects,
)

from sgl_pipeline.errors import BrokenObject, ConfigurationError, StoreError
from sgl_pipeline.kv_store.object_names import object_name
from sgl_pipeline.kv_store.open_store import open_objects, open_pages
from sgl_pipeline.kv_store.page_store import ObjectStore, PageStore, self_test
from sgl_pipeline.kv_store.storage_client import StorageClient
from sgl_pipeline.managers.tiers.storage_launch import StorageProcess
from sgl_pipeline.managers.tiers.storage_server import READY, StorageSettings
from sgl_pipeline.process_lifetime import child_environment
from sgl_pipeline.wire.store_orders import StorePlace

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed"),
]

DYNAMIC = {
    "backend_name": "stored tensors",
    "module_path": "support.stored_tensors",
    "class_name": "StoredTensors",
}


def settings_of(folder: Path, backend: str, extra_config: dict[str, Any]) -> StorageSettings:
    return StorageSettings(
        address=str(folder / "storage"),
        backend=backend,
        extra_config=extra_config,
        digest=DIGEST,
        object_bytes=5000,
    )


def place_of(settings: StorageSettings) -> StorePlace:
    """Where clients find it."""
    backend, address = settings.backend, settings.address
    return StorePlace(backend=backend, address=address, digest=DIGEST, save_bytes_per_s=1 << 30)


@contextmanager
def storage_process(
    folder: Path, backend: str, extra_config: dict[str, Any]
) -> Iterator[StorePlace]:
    """A running one, which imports SGLang for seconds."""
    environment = child_environment()
    environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
    settings = settings_of(folder, backend, extra_config)
    process = StorageProcess(settings, environment)
    try:
        yield place_of(settings)
    finally:
        process.close()


def storage_thread(folder: Path, backend: str, extra_config: dict[str, Any]) -> StorePlace:
    """What the process does, in a thread of this one."""
    from sgl_pipeline.managers.tiers.storage_process import serve_storage

    settings = settings_of(folder, backend, extra_config)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    threading.Thread(target=serve_storage, args=(settings, theirs), daemon=True).start()
    with ours:
        assert ours.recv(1 << 12) == READY
    return place_of(settings)


def ends(place: StorePlace) -> tuple[PageStore, ObjectStore]:
    return open_pages(place, NUM_LAYERS), open_objects(place)


def check_pages_come_back(place: StorePlace) -> None:
    """What one server saves another finds."""
    store, objects = ends(place)
    self_test(objects, DIGEST)
    for number in range(40):
        save_page(store, objects, number)
    store, objects = ends(place)
    hashes = [page_hash(number) for number in range(41)]
    found = store.lookup(hashes)
    assert [record.page_hash for record in found] == hashes[:40]
    assert [read_page(objects, record) for record in found] == [
        contents_of(number) for number in range(40)
    ]
    assert store.lookup(hashes[40:]) == []
    assert open_pages(place, NUM_LAYERS + 1).lookup(hashes) == []
    store.drop(hashes[3])
    assert len(store.lookup(hashes)) == 3
    store.commit([write_objects(objects, 3)])
    assert len(store.lookup(hashes)) == 40


@pytest.mark.parametrize("interface", [0, 1])
def test_dynamic(tmp_path: Path, interface: int) -> None:
    config = DYNAMIC | {"interface_v1": interface}
    place = storage_thread(tmp_path, "dynamic", config)
    check_pages_come_back(place)
    check_faults(place)
    check_threads(place)
    store, objects = ends(place)
    record = store.lookup([page_hash(1)])[0]
    store.clear()
    assert store.lookup([page_hash(1)]) == []
    with pytest.raises(BrokenObject, match="missing"):
        read_page(objects, record)


def check_faults(place: StorePlace) -> None:
    client = StorageClient(place.address)
    (checksum,) = client.write("name", [bytes(5000)])
    with pytest.raises(BrokenObject, match="altered"):
        client.read_into("name", [bytearray(5000)], [checksum ^ 1], 5000)
    with pytest.raises(BrokenObject, match="bytes"):
        client.read_into("name", [bytearray(9000)], [checksum], 9000)
    with pytest.raises(BrokenObject, match="missing"):
        client.read_into("other", [bytearray(5000)], [checksum], 5000)
    with pytest.raises(StoreError, match="a chunk holds 8192"):
        client.write("large", [bytes(8193)])
    with pytest.raises(StoreError, match="did not take object refused"):
        client.write("refused", [b"x"])
    client.close()


def check_threads(place: StorePlace) -> None:
    """Clients beside each other do not write each other's chunks."""
    failures = list[BaseException]()

    def work(first: int) -> None:
        try:
            store, objects = ends(place)
            for number in range(first, first + 25):
                save_page(store, objects, number)
                (record,) = store.lookup([page_hash(number)])
                assert read_page(objects, record) == contents_of(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1000 * index,)) for index in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_upstreams_file_backend_and_a_process_that_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)
    config = {
        "backend_name": "files",
        "module_path": "sglang.srt.mem_cache.hicache_storage",
        "class_name": "HiCacheFile",
        "file_storage_path": str(tmp_path / "pages"),
    }
    with storage_process(tmp_path, "dynamic", config) as place:
        check_pages_come_back(place)
        name = object_name(page_hash(1), DIGEST, range(1))
        assert (tmp_path / "pages" / f"{name}_{DIGEST}.bin").stat().st_size == 8192
        store, objects = ends(place)
        (record,) = store.lookup([page_hash(1)])
    with pytest.raises(StoreError, match="does not answer"):
        store.lookup([page_hash(1)])
    with pytest.raises(StoreError, match="does not answer"):
        read_page(objects, record)
    storage_thread(tmp_path, "dynamic", config)
    assert len(store.lookup([page_hash(1)])) == 1
    assert read_page(objects, record) == contents_of(1)


def test_nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl", reason="nixl is not installed")
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR", str(tmp_path / "pages"))
    with storage_process(tmp_path, "nixl", {"plugin": {"posix": {"active": True}}}) as place:
        check_pages_come_back(place)
        check_threads(place)
        store, _ = ends(place)
        store.clear()
        assert store.lookup([page_hash(1)]) == []


def test_mooncake(tmp_path: Path) -> None:
    """Its `clear` keeps for some seconds what was read."""
    mooncake = pytest.importorskip("mooncake", reason="mooncake is not installed")
    held = [reserve_port(), reserve_port()]
    port, metrics_port = map(number_of, held)
    for one in held:
        one.close()
    command = [str(Path(mooncake.__file__).parent / "mooncake_master")]
    command += ["--port", str(port), "--metrics_port", str(metrics_port)]
    config = {
        "master_server_address": f"127.0.0.1:{port}",
        "metadata_server": "P2PHANDSHAKE",
        "local_hostname": "127.0.0.1",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": 1 << 26,
    }
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as master:
        try:
            with storage_process(tmp_path, "mooncake", config) as place:
                check_pages_come_back(place)
                check_threads(place)
        finally:
            master.kill()


def test_a_backend_that_cannot_be_set_up_is_named(tmp_path: Path) -> None:
    config = DYNAMIC | {"module_path": "nowhere"}
    with (
        pytest.raises(ConfigurationError, match=r"--hicache-storage-backend dynamic.*nowhere"),
        storage_process(tmp_path, "dynamic", config),
    ):
        pass
