"""SGLang's own file backend, unmodified, reads our objects, and ours reads its.

Its names end with `_{model_name}`. With `H0`, the constant end of our names, as that name, its keys
are the rest of them.
"""

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.store_files import (
    DIGEST,
    NUM_LAYERS,
    contents_of,
    open_store,
    page_content,
    page_hash,
    read_page,
    save_page,
)

from sgl_pipeline.kv_store.object_names import object_name
from sgl_pipeline.kv_store.store_folder import open_folder


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    storage = pytest.importorskip("sglang.srt.mem_cache.hicache_storage")
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)
    open_folder(tmp_path)
    config = storage.HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=True,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="H0",
        extra_config={"file_storage_path": str(tmp_path)},
    )
    return storage.HiCacheFile(config)


def key(number: int, layer: int) -> str:
    return object_name(page_hash(number), DIGEST, layer).removesuffix("_H0")


def test_it_reads_what_we_write(tmp_path: Path, upstream: Any) -> None:
    save_page(*open_store(tmp_path), 7)
    targets = [torch.zeros(96, dtype=torch.uint8) for _ in range(NUM_LAYERS)]
    keys = [key(7, layer) for layer in range(NUM_LAYERS)]
    assert upstream.batch_exists([*keys, key(8, 0)]) == NUM_LAYERS
    found = upstream.batch_get(keys, targets)
    assert [bytes(tensor.numpy()) for tensor in found] == contents_of(7)


def test_we_read_what_it_writes(tmp_path: Path, upstream: Any) -> None:
    store, objects = open_store(tmp_path)
    record = None
    for layer in range(NUM_LAYERS):
        content = page_content(7, layer)
        assert upstream.set(key(7, layer), torch.frombuffer(bytearray(content), dtype=torch.uint8))
        buffer = bytearray(96)
        name = object_name(page_hash(7), DIGEST, layer)
        objects.read_into(name, buffer, 96, zlib.crc32(content))
        assert buffer == content
    assert record is None and store.lookup([page_hash(7)]) == []


def test_after_its_clear_our_records_are_broken_and_the_folder_is_ours(
    tmp_path: Path, upstream: Any
) -> None:
    store, objects = open_store(tmp_path)
    save_page(store, objects, 7)
    upstream.clear()
    store, objects = open_store(tmp_path)
    (record,) = store.lookup([page_hash(7)])
    with pytest.raises(Exception, match="missing"):
        read_page(objects, record)
    save_page(store, objects, 7)
    assert read_page(objects, record) == contents_of(7)
