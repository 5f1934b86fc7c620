"""Transfers of a GPU's pages, on a GPU: they have run on an H200.

The order of copies and steps is tested without one in `cuda/test_stream_order.py`.
"""

from dataclasses import replace

import pytest
import torch
from support.page_transfers import (
    PLACE,
    MemoryStore,
    await_reports,
    checksums_of,
    filled_pool,
    load_order,
    open_transfers,
    page_content,
    pool_content,
    save_order,
    shapes_of,
)

from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import UseStore

WHOLE = StagePlan(0, (3,))
PAGES, NUMBERS = [5, 0, 7], [11, 12, 13]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def pool_on_gpu(dtype: torch.dtype, seed: int) -> KvPool:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    shapes = [replace(shape, device=device) for shape in shapes_of(dtype)]
    return filled_pool(range(3), shapes, seed)


def start(kv_pool: KvPool, store: MemoryStore) -> PageTransfers:
    transfers = open_transfers(kv_pool, WHOLE, 0, store)
    transfers.obey(UseStore(PLACE))
    return transfers


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("groups_layers", [False, True])
def test_objects_of_a_gpu_are_those_of_a_cpu(dtype: torch.dtype, groups_layers: bool) -> None:
    of_gpu, of_cpu = (MemoryStore(groups_layers=groups_layers) for _ in range(2))
    pools = pool_on_gpu(dtype, 1), filled_pool(range(3), shapes_of(dtype), 1)
    for kv_pool, store in zip(pools, (of_gpu, of_cpu), strict=True):
        transfers = start(kv_pool, store)
        transfers.obey(save_order(1, PAGES, NUMBERS))
        (saved,) = await_reports(transfers)
        transfers.close()
    assert of_gpu.objects == of_cpu.objects
    target = pool_on_gpu(dtype, 2)
    before = pool_content(target)
    transfers = start(target, of_cpu)
    cuts = (0,) if groups_layers else ()
    transfers.obey(load_order(2, [1, 2, 3], NUMBERS, checksums_of(saved), cuts))
    assert await_reports(transfers)[0].num_pages == 3
    transfers.close()
    for layer in range(3):
        for page, loaded in zip(PAGES, (1, 2, 3), strict=True):
            assert page_content(target, layer, loaded) == page_content(pools[1], layer, page)
    others = [at for at in range(len(before)) if at % target.num_pages not in (1, 2, 3)]
    after = pool_content(target)
    assert [before[at] for at in others] == [after[at] for at in others]


@pytest.mark.gpu
def test_a_save_sees_what_steps_write_that_were_only_launched() -> None:
    kv_pool, store = pool_on_gpu(torch.float32, 1), MemoryStore()
    transfers = start(kv_pool, store)
    work = torch.randn(8192, 8192, device=kv_pool.device)
    for turn in range(1, 6):
        for _ in range(10):
            work = (work @ work).tanh()
        for layer in range(3):
            for part in kv_pool.rows(layer):
                part[5] = turn
        later = torch.cuda.Event()
        later.record()
        transfers.obey(save_order(turn, [5], [turn]))
        assert not later.query(), "ordering a save waited for the steps"
        await_reports(transfers)
    transfers.close()
    contents = [set(content) for content in store.objects.values()]
    assert contents == [{turn} for turn in range(1, 6) for _ in range(3)]


@pytest.mark.gpu
def test_steps_after_a_report_see_what_was_loaded() -> None:
    source, store = pool_on_gpu(torch.bfloat16, 1), MemoryStore()
    transfers = start(source, store)
    transfers.obey(save_order(1, PAGES, NUMBERS))
    (saved,) = await_reports(transfers)
    expected = [part[PAGES].clone() for layer in range(3) for part in source.rows(layer)]
    for turn in range(2, 30):
        for layer in range(3):
            for part in source.rows(layer):
                part[PAGES] = 0
        transfers.obey(load_order(turn, PAGES, NUMBERS, checksums_of(saved)))
        await_reports(transfers)
        seen = [part[PAGES].clone() for layer in range(3) for part in source.rows(layer)]
        assert all(map(torch.equal, seen, expected)), turn
    transfers.close()


@pytest.mark.gpu
def test_steps_after_an_end_are_not_overwritten() -> None:
    kv_pool, store = pool_on_gpu(torch.bfloat16, 1), MemoryStore()
    transfers = start(kv_pool, store)
    transfers.obey(save_order(1, PAGES, NUMBERS))
    (saved,) = await_reports(transfers)
    for turn in range(2, 60):
        transfers.obey(load_order(turn, PAGES, NUMBERS, checksums_of(saved)))
        transfers.cancel()
        for layer in range(3):
            for part in kv_pool.rows(layer):
                part[:] = turn
        transfers.obey(UseStore(PLACE))
        for layer in range(3):
            for part in kv_pool.rows(layer):
                assert bool((part == turn).all()), turn
    transfers.close()
