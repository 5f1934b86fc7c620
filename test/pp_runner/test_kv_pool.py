"""Pages by model-wide layer id: their bytes, and layers that come and go."""

import pytest
import torch

from sgl_pipeline.pp_runner.attention.backend import AttentionShape
from sgl_pipeline.pp_runner.kv_pool import KvPool, kv_page_bytes

SHAPE = AttentionShape(4, 2, 4, 3, 1.0, torch.float32, torch.device("cpu"))


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
