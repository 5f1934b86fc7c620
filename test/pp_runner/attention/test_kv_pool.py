"""Pages by model-wide layer id: their bytes, and layers that come and go."""

from dataclasses import replace

import pytest
import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool, kv_page_bytes
from sgl_pipeline.pp_runner.base.kv_format import CODED_DTYPES, decode

SHAPE = AttentionShape(4, 2, 4, 3, 1.0, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("coded_dtype", CODED_DTYPES.values(), ids=str)
def test_pages_of_codes_are_counted_with_their_scales(coded_dtype: torch.dtype) -> None:
    shape = replace(SHAPE, coded_dtype=coded_dtype)
    coded = KvPool(range(4, 6), shape, 5)
    assert kv_page_bytes(shape, num_layers=2) * 5 == coded.num_bytes
    scale_bytes = 4 if coded_dtype == torch.int8 else 0
    assert kv_page_bytes(shape, 1) == 2 * 3 * 2 * (4 + scale_bytes)
    for pages in coded.pages(4):
        assert pages.dtype == coded_dtype and not decode(pages, torch.float32).any()


def pool() -> KvPool:
    return KvPool(range(4, 6), SHAPE, 5)


def test_bytes_are_those_of_all_layers_pages():
    assert kv_page_bytes(SHAPE, num_layers=2) * 5 == pool().num_bytes
    assert pool().num_bytes == sum(t.nbytes for layer in (4, 5) for t in pool().pages(layer))


def test_layers_come_and_go_and_keep_their_ids():
    kv_pool = pool()
    kept = kv_pool.pages(5)[0]
    kv_pool.add_layer(9)
    kv_pool.remove_layer(4)
    assert kv_pool.layers == (5, 9)
    assert kv_pool.pages(5)[0] is kept
    assert not kv_pool.pages(9)[0].any()
    with pytest.raises(KeyError):
        kv_pool.pages(4)


def test_memory_for_layers_that_may_come_is_there_from_the_start_and_stays() -> None:
    pool = KvPool(range(4, 6), SHAPE, 5, max_layers=3)
    num_bytes = pool.num_bytes
    assert num_bytes == KvPool(range(3), SHAPE, 5).num_bytes
    spare = pool._spare[0][0].data_ptr()
    pool.add_layer(6)
    assert pool.pages(6)[0].data_ptr() == spare
    pool.remove_layer(4)
    assert (pool.layers, pool.num_bytes) == ((5, 6), num_bytes)
    # More than that are possible, and are not kept.
    for layer in (7, 8):
        pool.add_layer(layer)
    assert pool.num_bytes > num_bytes
    pool.remove_layer(8)
    assert pool.num_bytes == num_bytes
