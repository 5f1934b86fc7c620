"""What a backend of SGLang is given, and what becomes of its answers."""

from typing import Any

import pytest
import torch
from support.store_files import DIGEST

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.tiers.staging_pool import ALIGNMENT_BYTES, StagingPool, aligned_bytes

DYNAMIC = {
    "backend_name": "stored tensors",
    "module_path": "support.stored_tensors",
    "class_name": "StoredTensors",
}


def make(backend: str, config: dict[str, Any]) -> tuple[StagingPool, Any]:
    pytest.importorskip("sglang.srt.mem_cache.hicache_storage")
    from sgl_pipeline.managers.tiers import upstream_storage

    pool = StagingPool(ALIGNMENT_BYTES, 6)
    return pool, upstream_storage.UpstreamStorage(backend, config, DIGEST, pool)


@pytest.mark.parametrize("interface", [0, 1])
def test_chunks_go_and_come_back(interface: int) -> None:
    pool, storage = make("dynamic", DYNAMIC | {"interface_v1": interface})
    pool.kv_buffer.random_(256)
    before = pool.kv_buffer.clone()
    assert storage.set(["a", "b"], 1) == [True, True]
    assert storage.count(["a", "b", "c"]) == 2
    assert storage.get(["b", "c", "a"], 3) == [True, False, True]
    assert torch.equal(pool.kv_buffer[:4], torch.stack([*before[:3], before[2]]))
    assert torch.equal(pool.kv_buffer[5], before[1])
    storage.clear()
    assert storage.count(["a"]) == 0


@pytest.mark.parametrize(("interface", "taken"), [(0, [False, False]), (1, [True, False])])
def test_what_is_not_taken_is_told(interface: int, taken: list[bool]) -> None:
    _, storage = make("dynamic", DYNAMIC | {"interface_v1": interface})
    assert storage.set(["a", "refused"], 0) == taken


@pytest.mark.parametrize(
    ("backend", "config", "reason"),
    [
        ("dynamic", {}, "backend_name"),
        ("dynamic", DYNAMIC | {"class_name": "Path"}, "Path"),
        ("hf3fs", {}, "has not been tried"),
    ],
)
def test_a_backend_that_cannot_be_set_up_is_named(
    backend: str, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        make(backend, config)


def test_the_pool_is_what_upstreams_pools_are() -> None:
    mha = pytest.importorskip("sglang.srt.mem_cache.pool_host.mha")
    pool = StagingPool(ALIGNMENT_BYTES, 6)
    methods = {name for name, one in vars(StagingPool).items() if callable(one)}
    assert methods <= set(dir(mha.MHATokenToKVPoolHost))
    assert pool.is_stride_page_aligned()
    pointers, sizes = pool.get_page_buffer_meta(torch.tensor([0, 5]))
    assert pointers[1] - pointers[0] == 5 * ALIGNMENT_BYTES
    assert sizes == [ALIGNMENT_BYTES] * 2
    assert [aligned_bytes(size) for size in (1, 4096, 4097)] == [4096, 4096, 8192]
