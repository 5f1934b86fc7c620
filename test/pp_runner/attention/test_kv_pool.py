"""Pages by model-wide layer id: their bytes, and layers that come and go."""

from dataclasses import replace

import pytest
import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool, kv_page_bytes, largest_page_bytes
from sgl_pipeline.pp_runner.base.kv_format import CODED_DTYPES, decode

SHAPE = AttentionShape(
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=4,
    value_dim=4,
    page_size=3,
    scale=1.0,
    dtype=torch.float32,
    device=torch.device("cpu"),
)
# Layers of two kinds: the first one has the larger values, the others the larger keys.
UNEQUAL = [replace(SHAPE, value_dim=12), *[replace(SHAPE, num_kv_heads=1, head_dim=16)] * 3]


@pytest.mark.parametrize("coded_dtype", CODED_DTYPES.values(), ids=str)
def test_pages_of_codes_are_counted_with_their_scales(coded_dtype: torch.dtype) -> None:
    shape = replace(SHAPE, coded_dtype=coded_dtype)
    shapes = [shape] * 8
    coded = KvPool(range(4, 6), shapes, 5)
    assert kv_page_bytes(shapes, (4, 5)) * 5 == coded.num_bytes
    scale_bytes = 4 if coded_dtype == torch.int8 else 0
    assert shape.page_bytes == 2 * 3 * 2 * (4 + scale_bytes)
    for pages in coded.pages(4):
        assert pages.dtype == coded_dtype and not decode(pages, torch.float32).any()


def pool() -> KvPool:
    return KvPool(range(4, 6), [SHAPE] * 10, 5)


def test_bytes_are_those_of_all_layers_pages():
    assert 2 * SHAPE.page_bytes * 5 == pool().num_bytes
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
    pool = KvPool(range(4, 6), [SHAPE] * 10, 5, max_layers=3)
    num_bytes = pool.num_bytes
    assert num_bytes == KvPool(range(3), [SHAPE] * 3, 5).num_bytes
    spare = pool._spare[0].pages[0].data_ptr()
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


@pytest.mark.parametrize("max_layers", [0, 3])
def test_a_layer_has_pages_of_its_own_shape(max_layers: int) -> None:
    pool = KvPool([0, 1], UNEQUAL, 5, max_layers=max_layers)
    for layer in (0, 1):
        keys, values = pool.pages(layer)
        assert keys.shape == (5, *UNEQUAL[layer].key_page_shape)
        assert values.shape == (5, *UNEQUAL[layer].value_page_shape)
        keys.fill_(layer + 1)
        values.fill_(-layer - 1)
    for layer in (0, 1):
        keys, values = pool.pages(layer)
        assert (keys == layer + 1).all() and (values == -layer - 1).all()


def test_without_layers_that_come_each_takes_what_it_needs() -> None:
    pool = KvPool([0, 1], UNEQUAL, 5)
    assert pool.num_bytes == 5 * kv_page_bytes(UNEQUAL, [0, 1])


def test_memory_of_another_shape_holds_zeros_and_never_what_the_other_layer_left() -> None:
    """Another layer's numbers could be read as codes or scales of any size."""
    pool = KvPool([0], UNEQUAL, 5, max_layers=1)
    num_bytes = pool.num_bytes
    assert num_bytes == 5 * largest_page_bytes(UNEQUAL) >= 5 * UNEQUAL[0].page_bytes
    for pages in pool.pages(0):
        pages.fill_(float("nan"))
    memory = pool.pages(0)[0].data_ptr()
    pool.remove_layer(0)
    pool.add_layer(2)
    assert pool.pages(2)[0].data_ptr() == memory and pool.num_bytes == num_bytes
    assert not any(pages.any() for pages in pool.pages(2))
    # The same shape again: as they were, which are finite numbers of that layer's kind.
    for pages in pool.pages(2):
        pages.fill_(3)
    pool.remove_layer(2)
    pool.add_layer(3)
    assert all((pages == 3).all() for pages in pool.pages(3))
