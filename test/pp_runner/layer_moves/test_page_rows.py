"""Pages as rows of bytes: what is unpacked is what was packed, and nothing else changes."""

from dataclasses import replace

import pytest
import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base.download import NoDownload
from sgl_pipeline.pp_runner.base.kv_format import CODED_DTYPES, encode, head_dim_of
from sgl_pipeline.pp_runner.layer_moves.page_rows import CELL_BYTES, PageRows

NUM_PAGES = 9


def shape_of(dtype: torch.dtype, page_size: int) -> AttentionShape:
    return AttentionShape(
        num_query_heads=2,
        num_kv_heads=1,
        head_dim=6,
        value_dim=6,
        page_size=page_size,
        scale=1.0,
        dtype=dtype,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *CODED_DTYPES.values()])
@pytest.mark.parametrize("value_dim", [6, 10, 2])
def test_pages_arrive_where_they_were(value_dim: int, dtype: torch.dtype, page_size: int) -> None:
    shape = replace(shape_of(dtype, page_size), value_dim=value_dim)
    if dtype in CODED_DTYPES.values():
        shape = replace(shape, dtype=torch.bfloat16, coded_dtype=dtype)
    # Layer 3 has the larger pages.
    shapes = [*[replace(shape, head_dim=14)] * 4, shape]
    source, target = KvPool([3, 4], shapes, NUM_PAGES), KvPool([4], shapes, NUM_PAGES)
    for layer in (3, 4):
        for pages in source.pages(layer):
            numbers = torch.randn(*pages.shape[:3], head_dim_of(pages))
            pages.copy_(encode(numbers.to(shape.dtype), pages.dtype))
    for pages in target.pages(4):
        pages.fill_(7)
    chosen = [8, 0, 5]
    packing = PageRows(source, None, NoDownload(), lambda values: values)
    (rows,) = packing.pack(4, chosen).tensors()
    assert rows.dtype == torch.uint8
    assert rows.shape == (3 * packing.row_bytes(4) // CELL_BYTES, CELL_BYTES)
    keys, values = source.rows(4)
    least_bytes = CELL_BYTES + keys.shape[1] + values.shape[1]
    assert least_bytes <= packing.row_bytes(4) < least_bytes + CELL_BYTES
    PageRows(target, None, NoDownload(), lambda values: values).unpack(rows)
    for sent, received in zip(source.pages(4), target.pages(4), strict=True):
        for page in range(NUM_PAGES):
            if page in chosen:
                assert torch.equal(sent[page].view(torch.uint8), received[page].view(torch.uint8))
            else:
                assert (received[page].float() == 7.0).all()
