"""Pages as rows of bytes: what is unpacked is what was packed, and nothing else changes."""

import pytest
import torch

from sgl_pipeline.pp_runner.attention.backend import AttentionShape
from sgl_pipeline.pp_runner.kv_pool import KvPool, kv_page_bytes
from sgl_pipeline.pp_runner.layer_moves.page_rows import PageRows, row_bytes

NUM_PAGES = 9


def shape_of(dtype: torch.dtype, page_size: int) -> AttentionShape:
    return AttentionShape(
        num_query_heads=2,
        num_kv_heads=1,
        head_dim=6,
        page_size=page_size,
        scale=1.0,
        dtype=dtype,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_arrive_where_they_were(dtype: torch.dtype, page_size: int) -> None:
    shape = shape_of(dtype, page_size)
    source, target = KvPool([3, 4], shape, NUM_PAGES), KvPool([4], shape, NUM_PAGES)
    for layer in (3, 4):
        for pages in source.pages(layer):
            pages.copy_(torch.randn(pages.shape).to(dtype))
    for pages in target.pages(4):
        pages.fill_(7.0)
    page_bytes = kv_page_bytes(shape, 1)
    chosen = [8, 0, 5]
    rows = PageRows(source, page_bytes).pack(4, chosen)
    assert rows.dtype == torch.uint8
    assert rows.shape == (3, row_bytes(page_bytes))
    assert row_bytes(page_bytes) % 16 == 0
    PageRows(target, page_bytes).unpack(rows)
    for sent, received in zip(source.pages(4), target.pages(4), strict=True):
        for page in range(NUM_PAGES):
            if page in chosen:
                assert torch.equal(sent[page], received[page])
            else:
                assert (received[page] == 7.0).all()
