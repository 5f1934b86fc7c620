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
from sgl_pipeline.object_layers import object_layers


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


def key(number: int, layers: range) -> str:
    return object_name(page_hash(number), DIGEST, layers).removesuffix("_H0")


@pytest.mark.parametrize("cuts", [(), (0,), (0, 1)])
def test_it_reads_what_we_write(tmp_path: Path, upstream: Any, cuts: tuple[int, ...]) -> None:
    save_page(*open_store(tmp_path), 7, cuts=cuts)
    objects = object_layers(cuts, NUM_LAYERS)
    targets = [torch.zeros(96 * len(layers), dtype=torch.uint8) for layers in objects]
    keys = [key(7, layers) for layers in objects]
    assert upstream.batch_exists([*keys, key(8, range(1))]) == len(objects)
    found = upstream.batch_get(keys, targets)
    assert [bytes(tensor.numpy()) for tensor in found] == [
        b"".join(contents_of(7)[layers.start : layers.stop]) for layers in objects
    ]


@pytest.mark.parametrize("layers", [range(1), range(1, 3), range(3)])
def test_we_read_what_it_writes(tmp_path: Path, upstream: Any, layers: range) -> None:
    store, objects = open_store(tmp_path)
    contents = [page_content(7, layer) for layer in layers]
    whole = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)
    assert upstream.set(key(7, layers), whole)
    name = object_name(page_hash(7), DIGEST, layers)
    for index, content in enumerate(contents):
        buffer = bytearray(96)
        objects.read_into(name, [buffer], [zlib.crc32(content)], len(whole), 96 * index)
        assert buffer == content
    assert store.lookup([page_hash(7)]) == []


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
