"""Pages by model-wide layer id: where a row goes, and layers that come and go."""

import pytest
import torch

from sgl_pipeline.pp_runner.attention.backend import AttentionShape
from sgl_pipeline.pp_runner.kv_pool import KvPool, kv_page_bytes

CPU = torch.device("cpu")


def pool(layers: range = range(4, 6)) -> KvPool:
    return KvPool(
        layers,
        num_pages=5,
        page_size=3,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.float32,
        device=CPU,
    )


def test_a_row_lands_in_its_slot_of_its_layer_alone():
    kv_pool = pool()
    keys, values = torch.full((2, 2, 4), 1.0), torch.full((2, 2, 4), 2.0)
    kv_pool.write(5, torch.tensor([7, 0]), keys, values)
    key_pages, value_pages = kv_pool.pages(5)
    assert key_pages.shape == value_pages.shape == (5, 3, 2, 4)
    for pages, number in ((key_pages, 1.0), (value_pages, 2.0)):
        assert (pages[2, 1] == number).all() and (pages[0, 0] == number).all()
        assert pages.sum() == number * 2 * 8
    assert not any(pages.any() for pages in kv_pool.pages(4))


def test_rows_may_be_views_that_are_not_contiguous():
    kv_pool = pool()
    heads = torch.arange(2 * 6 * 4, dtype=torch.float32).view(2, 6, 4)
    kv_pool.write(4, torch.tensor([3, 4]), heads[:, 2:4], heads[:, 4:])
    assert torch.equal(kv_pool.pages(4)[0][1, :2], heads[:, 2:4])
    assert torch.equal(kv_pool.pages(4)[1][1, :2], heads[:, 4:])


def test_bytes_are_those_of_all_layers_pages():
    shape = AttentionShape(4, 2, 4, 3, 1.0, torch.float32, CPU)
    assert kv_page_bytes(shape, num_layers=2) * 5 == pool().num_bytes
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
