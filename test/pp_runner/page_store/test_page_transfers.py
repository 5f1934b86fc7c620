"""Pages go to a store and come back, to stages of any split; what is cancelled touches nothing."""

import os
import select
import threading
import time
from random import Random

import pytest
import torch
from support.page_transfers import (
    DIGEST,
    NUM_PAGES,
    PLACE,
    Gate,
    MemoryStore,
    await_reports,
    checksums_of,
    filled_pool,
    hash_of,
    load_order,
    open_transfers,
    page_content,
    pool_content,
    save_order,
    shapes_of,
)

from sgl_pipeline.errors import ProtocolError, StoreFull
from sgl_pipeline.kv_store.object_names import object_name
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base import compute_threads
from sgl_pipeline.pp_runner.page_store import transfer_jobs
from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import PagesLoaded, PagesSaved, UseStore

WHOLE = StagePlan(0, (3,))
PAGES, NUMBERS = [5, 0, 7], [11, 12, 13]


class Saved:
    """A pool of all three layers whose PAGES are in a store."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shapes, self.store = shapes_of(dtype), MemoryStore()
        self.kv_pool = filled_pool(range(3), self.shapes, 1)
        transfers = open_transfers(self.kv_pool, WHOLE, 0, self.store)
        transfers.obey(UseStore(PLACE))
        transfers.obey(save_order(1, PAGES, NUMBERS))
        (report,) = await_reports(transfers)
        assert isinstance(report, PagesSaved)
        self.report = report
        transfers.close()

    @property
    def checksums(self) -> list[int]:
        return checksums_of(self.report)

    def change(self, number: int, layer: int, content: bytes | None) -> None:
        name = object_name(hash_of(number), DIGEST, layer)
        if content is None:
            del self.store.objects[name]
        else:
            self.store.objects[name] = content

    def content(self, number: int, layer: int) -> bytes:
        return self.store.objects[object_name(hash_of(number), DIGEST, layer)]


def start(
    kv_pool: KvPool, store: MemoryStore, plan: StagePlan = WHOLE, stage: int = 0
) -> PageTransfers:
    transfers = open_transfers(kv_pool, plan, stage, store)
    transfers.obey(UseStore(PLACE))
    return transfers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_save_writes_an_object_for_each_page_and_layer(dtype: torch.dtype) -> None:
    saved = Saved(dtype)
    assert len(saved.store.objects) == 9
    for page, number in zip(PAGES, NUMBERS, strict=True):
        for layer in range(3):
            assert saved.content(number, layer) == page_content(saved.kv_pool, layer, page)
    report = saved.report
    assert (report.stage, report.transfer, report.num_pages, report.message) == (0, 1, 3, "")
    assert report.layers == (0, 3)
    assert report.sizes == tuple(shape.page_bytes for shape in saved.shapes)
    assert saved.checksums == saved.store.checksums(NUMBERS, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("counts", [(3,), (1, 2), (2, 1), (1, 1, 1)], ids=str)
def test_stages_of_another_split_load_their_layers(
    dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    saved, plan = Saved(dtype), StagePlan(4, counts)
    targets = [2, 6, 3]
    for stage in range(plan.num_stages):
        layers = plan.layers_of(stage)
        kv_pool = filled_pool(layers, saved.shapes, 2)
        before = pool_content(kv_pool)
        transfers = start(kv_pool, saved.store, plan, stage)
        transfers.obey(load_order(9, targets, NUMBERS, saved.checksums))
        (report,) = await_reports(transfers)
        assert isinstance(report, PagesLoaded)
        assert (report.stage, report.num_pages, report.message) == (stage, 3, "")
        assert report.num_bytes == 3 * sum(saved.shapes[layer].page_bytes for layer in layers)
        for layer in layers:
            for target, page in zip(targets, PAGES, strict=True):
                assert page_content(kv_pool, layer, target) == page_content(
                    saved.kv_pool, layer, page
                )
        others = [at for at in range(len(before)) if at % NUM_PAGES not in targets]
        after = pool_content(kv_pool)
        assert [before[at] for at in others] == [after[at] for at in others]
        transfers.close()


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("harm", ["missing", "short", "long", "flipped"])
@pytest.mark.parametrize("good_pages", range(3))
def test_a_broken_object_ends_a_load_behind_the_good_prefix(
    good_pages: int, harm: str, layer: int
) -> None:
    saved = Saved()
    number = NUMBERS[good_pages]
    content = saved.content(number, layer)
    changed = {
        "missing": None,
        "short": content[:-1],
        "long": content + b"!",
        "flipped": content[:9] + bytes([content[9] ^ 1]) + content[10:],
    }
    checksums = saved.checksums
    saved.change(number, layer, changed[harm])
    kv_pool = filled_pool(range(3), saved.shapes, 2)
    transfers = start(kv_pool, saved.store)
    broken_page = page_content(kv_pool, layer, PAGES[good_pages])
    transfers.obey(load_order(2, PAGES, NUMBERS, checksums))
    (report,) = await_reports(transfers)
    assert isinstance(report, PagesLoaded)
    assert (report.num_pages, report.is_broken) == (good_pages, True)
    assert number.to_bytes(32, "big").hex() in report.message
    # Bytes that were not checked never reach the pool.
    assert page_content(kv_pool, layer, PAGES[good_pages]) == broken_page
    for page in PAGES[:good_pages]:
        assert page_content(kv_pool, layer, page) == page_content(saved.kv_pool, layer, page)
    transfers.close()


def failing_store(error: Exception, after: int) -> MemoryStore:
    accesses = iter(range(10**6))

    def fail() -> None:
        if next(accesses) >= after:
            raise error

    return MemoryStore(fail)


@pytest.mark.parametrize(
    ("error", "message"),
    [(StoreFull("the disk is full"), "the disk is full"), (OSError("no"), "OSError: no")],
)
def test_a_store_that_fails_costs_the_pages_behind(error: Exception, message: str) -> None:
    shapes = shapes_of(torch.bfloat16)
    kv_pool = filled_pool(range(3), shapes, 1)
    transfers = start(kv_pool, failing_store(error, after=5))
    transfers.obey(save_order(1, PAGES, NUMBERS))
    (saved,) = await_reports(transfers)
    assert isinstance(saved, PagesSaved)
    assert (saved.num_pages, saved.message) == (1, message)
    assert len(checksums_of(saved)) == 3 and len(saved.sizes) == 3
    transfers.obey(load_order(2, PAGES, NUMBERS, [0] * 9))
    (loaded,) = await_reports(transfers)
    # The record may be right: it is not the object that is at fault.
    assert loaded == PagesLoaded(
        stage=0, transfer=2, num_pages=0, num_bytes=0, busy_s=loaded.busy_s, message=message
    )
    transfers.close()


def test_a_load_that_comes_later_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_jobs, "MAX_YIELD_S", 10.0**6)  # only the load's end helps
    saved, gate = Saved(), Gate()
    store = MemoryStore(gate)
    store.objects = saved.store.objects
    transfers = start(saved.kv_pool, store)
    transfers.obey(save_order(1, PAGES, NUMBERS))
    gate.await_one()  # the save writes its first object
    transfers.obey(load_order(2, [1], [11], saved.checksums[:3]))
    gate.await_one()
    gate.open()
    first, second = await_reports(transfers, 2)
    assert (first.transfer, second.transfer) == (2, 1)
    assert first.num_pages == 1 and second.num_pages == 3
    transfers.close()


def test_transfers_wait_for_pages_that_are_on_their_way() -> None:
    saved = Saved()
    store, is_here = saved.store, threading.Event()
    store.log.clear()
    transfers = open_transfers(saved.kv_pool, WHOLE, 0, store, is_here.is_set)
    transfers.obey(UseStore(PLACE))
    transfers.obey(load_order(2, [1], [11], saved.checksums[:3]))
    time.sleep(0.02)
    assert transfers.take_reports() == [] and not store.log
    assert transfers.is_open
    is_here.set()
    assert await_reports(transfers)[0].num_pages == 1
    assert not transfers.is_open
    transfers.close()


def test_a_report_says_which_pages_a_load_has_filled() -> None:
    saved = Saved()
    saved.change(13, 0, None)
    transfers = start(saved.kv_pool, saved.store)
    transfers.obey(load_order(2, PAGES, NUMBERS, saved.checksums))
    transfers.obey(save_order(3, PAGES, NUMBERS))
    filled = []
    while transfers.is_open:
        filled += transfers.take_reports()
    assert {report.transfer: pages for report, pages in filled} == {2: (5, 0), 3: ()}
    transfers.close()


def test_its_descriptor_can_be_read_when_there_is_a_report_and_not_after() -> None:
    saved = Saved()
    transfers = start(saved.kv_pool, saved.store)
    assert transfers.descriptor is None
    for transfer in range(5):
        transfers.obey(save_order(transfer, [1], [50]))
        descriptor = transfers.descriptor
        assert descriptor is not None
        assert select.select([descriptor], [], [], 20.0)[0]
        assert len(transfers.take_reports()) == 1
        assert transfers.descriptor is None
    gate = Gate()
    saved.store._on_access = gate
    transfers.obey(save_order(9, [1], [50]))
    gate.await_one()
    # A wakeup of before does not let a stage look without end.
    transfers.take_reports()
    assert transfers.descriptor is not None
    assert not select.select([transfers.descriptor], [], [], 0.0)[0]
    gate.open()
    await_reports(transfers)
    transfers.close()


def test_a_transfer_needs_a_store() -> None:
    kv_pool = filled_pool(range(3), shapes_of(torch.bfloat16), 1)
    transfers = open_transfers(kv_pool, WHOLE, 0, MemoryStore())
    with pytest.raises(ProtocolError, match="transfer 4 was ordered, and no store is in use"):
        transfers.obey(save_order(4, [1], [1]))
    for end in (transfers.cancel, lambda: transfers.obey(UseStore(None))):
        transfers.obey(UseStore(PLACE))
        end()
        with pytest.raises(ProtocolError, match="no store is in use"):
            transfers.obey(save_order(4, [1], [1]))
    transfers.close()


def test_what_is_under_way_can_be_refused_and_the_store_stays() -> None:
    saved, gate = Saved(), Gate()
    store = MemoryStore(gate)
    store.objects = saved.store.objects
    transfers = start(saved.kv_pool, store)
    transfers.obey(load_order(1, PAGES, NUMBERS, saved.checksums))
    transfers.obey(save_order(2, PAGES, NUMBERS))
    transfers.obey(load_order(3, [1], [11], saved.checksums[:3]))
    reports = transfers.refuse_open("it goes")
    assert [(one.transfer, one.num_pages, one.message) for one in reports] == [
        (1, 0, "it goes"), (2, 0, "it goes"), (3, 0, "it goes"),
    ]  # fmt: skip
    assert not any(one.is_broken for one in reports if isinstance(one, PagesLoaded))
    gate.open()
    assert not transfers.is_open
    transfers.obey(load_order(4, [1], [11], saved.checksums[:3]))
    (report,) = await_reports(transfers)
    assert (report.transfer, report.num_pages) == (4, 1)
    transfers.close()


@pytest.mark.parametrize("way", ["cancel", "another store", "no store", "close"])
def test_what_is_cancelled_gives_no_report_and_writes_no_page(way: str) -> None:
    saved, gate = Saved(), Gate()
    store = MemoryStore(gate)
    store.objects = saved.store.objects
    kv_pool = filled_pool(range(3), saved.shapes, 2)
    transfers = start(kv_pool, store)
    transfers.obey(load_order(1, PAGES, NUMBERS, saved.checksums))
    transfers.obey(save_order(2, [1], [99]))
    gate.await_one()
    gate.await_one()  # both hang in the store
    session = transfers._sessions[""]
    before = pool_content(kv_pool)
    if way == "close":
        threading.Timer(0.01, gate.open).start()  # it waits for the store, a little
    {
        "cancel": transfers.cancel,
        "another store": lambda: transfers.obey(UseStore(PLACE)),
        "no store": lambda: transfers.obey(UseStore(None)),
        "close": transfers.close,
    }[way]()
    assert not transfers.is_open
    gate.open()
    session.join(20.0)
    assert not any(thread.is_alive() for thread in session._threads)
    assert pool_content(kv_pool) == before
    if way != "close":
        assert transfers.take_reports() == []
        transfers.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_pool_rests_from_the_moment_that_transfers_are_cancelled(seed: int) -> None:
    """Many cancels at random moments of loads and saves. After each, all pages are written anew, as
    steps would; a late load would change them, a late save would be seen with its new bytes."""
    random, saved = Random(seed), Saved()
    store = MemoryStore(lambda: time.sleep(random.choice([0.0, 0.0, 1e-5, 3e-4])))
    store.objects = saved.store.objects
    originals = dict(store.objects)
    kv_pool = filled_pool(range(3), saved.shapes, 2)
    transfers = start(kv_pool, store)
    memory = [pages for layer in range(3) for pages in kv_pool.pages(layer)]
    loaded = set()
    for turn in range(60):
        for pages in memory:
            pages.view(torch.uint8).fill_(turn)
        transfers.obey(load_order(3 * turn, PAGES, NUMBERS, saved.checksums))
        # Pages of this turn under names of this turn.
        transfers.obey(save_order(3 * turn + 1, [1, 2], [1000 + turn, 2000 + turn]))
        transfers.obey(load_order(3 * turn + 2, [3], [11], saved.checksums[:3]))
        time.sleep(random.random() * 4e-3)
        for report, _ in transfers.take_reports():
            assert report.transfer // 3 == turn and report.message == ""
            loaded.add(report.transfer % 3)
        transfers.cancel()
        for pages in memory:
            pages.view(torch.uint8).fill_(0xFF)
        time.sleep(random.random() * 1e-3)
        assert all((pages.view(torch.uint8) == 0xFF).all() for pages in memory), turn
        transfers.obey(UseStore(PLACE))
    transfers.close()
    assert loaded
    for number in NUMBERS:
        for layer in range(3):
            name = object_name(hash_of(number), DIGEST, layer)
            assert store.objects[name] == originals[name]
    for name, content in store.objects.items():
        number = int(name[:64], 16)
        if number >= 1000:
            assert set(content) == {number % 1000}


def test_its_threads_have_no_team_and_use_every_core_of_the_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that computed with torch would start a team of its own, on the cores of the steps;
    one that inherited the core of a bound thread would share it with the steps."""
    all_cores = os.sched_getaffinity(0)
    monkeypatch.setattr(compute_threads, "_cores", sorted(all_cores))
    affinities = set()
    saved = Saved()
    saved.store._on_access = lambda: affinities.add(frozenset(os.sched_getaffinity(0)))
    before = set(os.listdir("/proc/self/task"))
    try:
        os.sched_setaffinity(0, {min(all_cores)})
        transfers = start(saved.kv_pool, saved.store)
        transfers.obey(save_order(1, PAGES, [7, 8, 9]))
        transfers.obey(load_order(2, PAGES, NUMBERS, saved.checksums))
        await_reports(transfers, 2)
        assert len(set(os.listdir("/proc/self/task")) - before) == 2
    finally:
        os.sched_setaffinity(0, all_cores)
    assert affinities == {frozenset(all_cores)}
    transfers.close()
