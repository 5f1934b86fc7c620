"""The bytes of an object: keys, then values, as they lie in the pool."""

import numpy as np
import pytest
import torch
from support.page_transfers import (
    NUM_PAGES,
    filled_pool,
    page_content,
    pool_content,
    shapes_of,
)

from sgl_pipeline.pp_runner.page_store.page_bytes import PageBytes

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_page_comes_back_as_it_was_and_nothing_else_changes(dtype: torch.dtype) -> None:
    shapes = shapes_of(dtype)
    source, target = filled_pool([0, 1], shapes, 1), filled_pool([0, 1], shapes, 2)
    for layer in (0, 1):
        pages, there = PageBytes(source, [layer]), PageBytes(target, [0, 1])
        content = np.full(shapes[layer].page_bytes + 5, 0xAB, dtype=np.uint8)
        pages.copy_out(layer, 6, content)
        assert content.tobytes() == page_content(source, layer, 6) + b"\xab" * 5
        before = pool_content(target)
        there.copy_in(layer, 2, content)
        after = pool_content(target)
        place = target.layers.index(layer) * NUM_PAGES + 2
        assert after[place] == page_content(source, layer, 6) != before[place]
        assert [*before[:place], *before[place + 1 :]] == [*after[:place], *after[place + 1 :]]


def test_plain_numbers_lie_as_upstream_has_them() -> None:
    """`page-unified-v1`: [keys and values, page, heads, head_dim]."""
    kv_pool = filled_pool([0], shapes_of(torch.float32), 3)
    content = np.empty(shapes_of(torch.float32)[0].page_bytes, dtype=np.uint8)
    PageBytes(kv_pool, [0]).copy_out(0, 4, content)
    keys, values = kv_pool.pages(0)
    unified = torch.stack((keys[4], values[4]))
    assert unified.shape == (2, 3, 2, 6)
    assert content.tobytes() == unified.numpy().tobytes()


def test_spare_memory_of_larger_layers_is_no_part_of_an_object() -> None:
    shapes = shapes_of(torch.bfloat16)
    kv_pool = filled_pool([0], shapes, 1)
    roomy = type(kv_pool)([0], shapes, NUM_PAGES, max_layers=2)
    content = np.empty(shapes[0].page_bytes, dtype=np.uint8)
    PageBytes(kv_pool, [0]).copy_out(0, 1, content)
    PageBytes(roomy, [0]).copy_in(0, 1, content)
    assert page_content(roomy, 0, 1) == page_content(kv_pool, 0, 1)
