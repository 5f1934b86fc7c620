"""A session whose copies are over only when it waits for them, as on a GPU.

What the calls do on a GPU is in `cuda/test_stream_order.py`; neither has run on hardware.
"""

import threading
import time

import pytest
import torch
from support.late_pages import LatePages
from support.page_transfers import (
    PLACE,
    Gate,
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
from sgl_pipeline.pp_runner.page_store import page_transfers
from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import UseStore

WHOLE = StagePlan(0, (3,))
PAGES, NUMBERS = [5, 0, 7], [11, 12, 13]
OBJECTS = 3 * len(PAGES)


@pytest.fixture(autouse=True)
def _late_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_transfers, "PageBytes", LatePages)


def start(kv_pool: KvPool, store: MemoryStore) -> PageTransfers:
    transfers = open_transfers(kv_pool, WHOLE, 0, store)
    transfers.obey(UseStore(PLACE))
    return transfers


def saved_store(*, groups_layers: bool = False) -> tuple[KvPool, MemoryStore, list[int]]:
    kv_pool = filled_pool(range(3), shapes_of(torch.bfloat16), 1)
    store = MemoryStore(groups_layers=groups_layers)
    transfers = start(kv_pool, store)
    transfers.obey(save_order(1, PAGES, NUMBERS))
    (report,) = await_reports(transfers)
    transfers.close()
    return kv_pool, store, checksums_of(report)


def test_a_save_writes_what_its_copies_brought() -> None:
    kv_pool, store, checksums = saved_store()
    contents = [page_content(kv_pool, layer, page) for page in PAGES for layer in range(3)]
    assert [*store.objects.values()] == contents
    assert checksums == store.checksums(NUMBERS, 3)
    calls = LatePages.newest.calls_of("page saves")
    assert calls == ["begin behind 1", *("copy", "wait") * OBJECTS]


def test_an_object_of_several_layers_is_written_when_all_its_copies_are_over() -> None:
    kv_pool, store, _ = saved_store(groups_layers=True)
    assert [*store.objects.values()] == [
        b"".join(page_content(kv_pool, layer, page) for layer in range(3)) for page in PAGES
    ]
    calls = LatePages.newest.calls_of("page saves")
    assert calls == ["begin behind 1", *("copy", "copy", "copy", "wait") * len(PAGES)]


@pytest.mark.parametrize("groups_layers", [False, True])
def test_a_load_is_reported_when_all_its_copies_are_over(groups_layers: bool) -> None:
    source, store, checksums = saved_store(groups_layers=groups_layers)
    target = filled_pool(range(3), shapes_of(torch.bfloat16), 2)
    transfers = start(target, store)
    cuts = (0,) if groups_layers else ()
    transfers.obey(load_order(1, PAGES, NUMBERS, checksums, cuts))
    (report,) = await_reports(transfers)
    assert report.num_pages == len(PAGES)
    for layer in range(3):
        for page in PAGES:
            assert page_content(target, layer, page) == page_content(source, layer, page)
    calls = LatePages.newest.calls_of("page loads")
    assert calls == ["begin behind 1", *["copy"] * OBJECTS, "wait"]
    transfers.close()


def test_the_good_prefix_of_a_load_that_fails_is_there_when_it_is_reported() -> None:
    source, store, checksums = saved_store()
    checksums[-1] ^= 1
    target = filled_pool(range(3), shapes_of(torch.bfloat16), 2)
    transfers = start(target, store)
    transfers.obey(load_order(1, PAGES, NUMBERS, checksums))
    (report,) = await_reports(transfers)
    assert report.num_pages == len(PAGES) - 1
    for layer in range(3):
        for page in PAGES[:-1]:
            assert page_content(target, layer, page) == page_content(source, layer, page)
    transfers.close()


def test_each_transfer_comes_after_the_steps_that_were_launched_when_it_was_ordered() -> None:
    kv_pool, store, checksums = saved_store()
    transfers = start(kv_pool, store)
    transfers.obey(save_order(1, [5], [21]))
    transfers.obey(load_order(2, [0], [11], checksums[:3]))
    transfers.obey(save_order(3, [7], [22]))
    await_reports(transfers, 3)
    pages = LatePages.newest
    assert pages.calls_of(threading.current_thread().name)[:3] == ["steps 1", "steps 2", "steps 3"]
    begun = [call for call in pages.calls_of("page saves") if call.startswith("begin")]
    assert begun == ["begin behind 1", "begin behind 3"]
    assert pages.calls_of("page loads")[0] == "begin behind 2"
    transfers.close()


@pytest.mark.parametrize("seed", range(4))
def test_steps_after_the_end_come_after_what_has_begun_and_nothing_begins_then(seed: int) -> None:
    kv_pool, store, checksums = saved_store()
    gate = Gate()
    store._on_access = gate
    transfers = start(kv_pool, store)
    pages = LatePages.newest
    transfers.obey(load_order(1, PAGES, NUMBERS, checksums))
    transfers.obey(save_order(2, [1, 2], [31, 32]))
    gate.open()
    time.sleep(seed * 3e-4)
    transfers.cancel()
    after = pages.calls.index((threading.current_thread().name, "steps follow"))
    content = pool_content(kv_pool)
    time.sleep(0.02)
    assert pool_content(kv_pool) == content
    assert not [call for _, call in pages.calls[after:] if call == "copy"]
    transfers.close()
