"""Pages go to a store and come back, to stages of any split; what is cancelled touches nothing."""

import os
import select
import threading
import time
import zlib
from random import Random

import msgspec
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
    layer_object,
    load_order,
    open_transfers,
    page_content,
    pool_content,
    save_order,
    shapes_of,
)

from sgl_pipeline.errors import ProtocolError, StoreFull
from sgl_pipeline.kv_store.object_names import object_name
from sgl_pipeline.object_layers import cuts_of, object_parts
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base import compute_threads
from sgl_pipeline.pp_runner.page_store import transfer_jobs
from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import PagesLoaded, PagesSaved, UseStore

WHOLE = StagePlan(0, (3,))
PAGES, NUMBERS = [5, 0, 7], [11, 12, 13]


class Saved:
    """A pool of all three layers whose PAGES are in a store.

    Args:
        counts: of the layers of each stage that has saved them; an object has all of a stage. By
            default one stage did, and an object has one layer.
    """

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, counts: tuple[int, ...] | None = None
    ) -> None:
        self.shapes = shapes_of(dtype)
        self.store = MemoryStore(groups_layers=counts is not None)
        self.kv_pool = filled_pool(range(3), self.shapes, 1)
        self.reports: list[PagesSaved] = []
        plan = StagePlan(0, counts or (3,))
        for stage in range(plan.num_stages):
            transfers = open_transfers(self.kv_pool, plan, stage, self.store)
            transfers.obey(UseStore(PLACE))
            transfers.obey(save_order(1, PAGES, NUMBERS))
            (report,) = await_reports(transfers)
            assert isinstance(report, PagesSaved)
            self.reports.append(report)
            transfers.close()
        runs = [plan.layers_of(stage) for stage in range(plan.num_stages)]
        self.cuts = cuts_of(runs) if counts else ()

    @property
    def checksums(self) -> list[int]:
        return [
            checksum
            for index in range(len(PAGES))
            for report in self.reports
            for checksum in checksums_of(report)[index * len(report.sizes) :][: len(report.sizes)]
        ]

    def part(self, number: int, layer: int) -> tuple[str, int]:
        """The object that has a layer of a page, and where the layer begins in it."""
        sizes = [shape.page_bytes for shape in self.shapes]
        (part,) = object_parts(self.cuts, sizes, range(layer, layer + 1))
        return object_name(hash_of(number), DIGEST, part.object_layers), part.offset

    def change(self, number: int, layer: int, content: bytes | None) -> None:
        """Replaces the object that has a layer of a page, or removes it."""
        name, _ = self.part(number, layer)
        if content is None:
            del self.store.objects[name]
        else:
            self.store.objects[name] = content


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
            content = saved.store.objects[layer_object(number, layer)]
            assert content == page_content(saved.kv_pool, layer, page)
    (report,) = saved.reports
    assert (report.stage, report.transfer, report.num_pages, report.message) == (0, 1, 3, "")
    assert (report.layers, report.is_grouped) == ((0, 3), False)
    assert report.sizes == tuple(shape.page_bytes for shape in saved.shapes)
    assert saved.checksums == saved.store.checksums(NUMBERS, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_a_save_writes_an_object_for_each_page_where_layers_are_grouped(
    dtype: torch.dtype,
) -> None:
    saved = Saved(dtype, (1, 2))
    assert len(saved.store.objects) == 6
    for page, number in zip(PAGES, NUMBERS, strict=True):
        contents = [page_content(saved.kv_pool, layer, page) for layer in range(3)]
        for layers in (range(1), range(1, 3)):
            content = saved.store.objects[object_name(hash_of(number), DIGEST, layers)]
            assert content == b"".join(contents[layers.start : layers.stop])
    first, second = saved.reports
    assert (first.layers, second.layers) == ((0, 1), (1, 3))
    assert first.is_grouped and second.is_grouped
    assert second.sizes == tuple(shape.page_bytes for shape in saved.shapes[1:])
    page_checksums = [zlib.crc32(content) for content in contents]
    assert saved.checksums[-3:] == page_checksums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("counts", [(3,), (1, 2), (2, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("saved_by", [None, (3,), (1, 2), (2, 1), (1, 1, 1)], ids=str)
def test_stages_of_another_split_load_their_layers(
    dtype: torch.dtype, counts: tuple[int, ...], saved_by: tuple[int, ...] | None
) -> None:
    saved, plan = Saved(dtype, saved_by), StagePlan(4, counts)
    targets = [2, 6, 3]
    for stage in range(plan.num_stages):
        layers = plan.layers_of(stage)
        kv_pool = filled_pool(layers, saved.shapes, 2)
        before = pool_content(kv_pool)
        transfers = start(kv_pool, saved.store, plan, stage)
        transfers.obey(load_order(9, targets, NUMBERS, saved.checksums, saved.cuts))
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


def test_the_pages_of_one_load_may_be_cut_in_several_ways() -> None:
    saved, others = Saved(counts=(1, 2)), Saved(counts=(2, 1))
    saved.store.objects = {
        name: content
        for one in (saved, others)
        for name, content in one.store.objects.items()
        if name.startswith(hash_of(NUMBERS[1]).hex()) is (one is others)
    }
    kv_pool = filled_pool(range(3), saved.shapes, 2)
    transfers = start(kv_pool, saved.store)
    order = load_order(2, [1, 2, 3], NUMBERS, saved.checksums)
    cuts = (saved.cuts, others.cuts, saved.cuts)
    transfers.obey(msgspec.structs.replace(order, cuts=cuts))
    assert await_reports(transfers)[0].num_pages == 3
    for layer in range(3):
        for target, page in zip((1, 2, 3), PAGES, strict=True):
            content = page_content(kv_pool, layer, target)
            assert content == page_content(saved.kv_pool, layer, page)
    transfers.close()


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("harm", ["missing", "short", "long", "flipped"])
@pytest.mark.parametrize("good_pages", range(3))
@pytest.mark.parametrize("saved_by", [None, (3,), (1, 2)], ids=str)
def test_a_broken_object_ends_a_load_behind_the_good_prefix(
    saved_by: tuple[int, ...] | None, good_pages: int, harm: str, layer: int
) -> None:
    saved = Saved(counts=saved_by)
    number = NUMBERS[good_pages]
    name, first = saved.part(number, layer)
    content, at = saved.store.objects[name], first + 9
    changed = {
        "missing": None,
        "short": content[:-1],
        "long": content + b"!",
        "flipped": content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :],
    }
    checksums = saved.checksums
    saved.change(number, layer, changed[harm])
    kv_pool = filled_pool(range(3), saved.shapes, 2)
    transfers = start(kv_pool, saved.store)
    broken_page = page_content(kv_pool, layer, PAGES[good_pages])
    transfers.obey(load_order(2, PAGES, NUMBERS, checksums, saved.cuts))
    (report,) = await_reports(transfers)
    assert isinstance(report, PagesLoaded)
    assert (report.num_pages, report.is_broken) == (good_pages, True)
    assert number.to_bytes(32, "big").hex() in report.message
    # Bytes that were not checked never reach the pool.
    assert page_content(kv_pool, layer, PAGES[good_pages]) == broken_page
    for page in PAGES[:good_pages]:
        assert page_content(kv_pool, layer, page) == page_content(saved.kv_pool, layer, page)
    transfers.close()


@pytest.mark.parametrize("layer", range(3))
def test_a_layer_that_is_altered_breaks_no_load_of_others_in_its_object(layer: int) -> None:
    saved, plan = Saved(counts=(3,)), StagePlan(4, (1, 1, 1))
    name, first = saved.part(NUMBERS[1], layer)
    content = saved.store.objects[name]
    saved.change(NUMBERS[1], layer, content[:first] + b"altered" + content[first + 7 :])
    for stage in range(3):
        kv_pool = filled_pool([stage], saved.shapes, 2)
        transfers = start(kv_pool, saved.store, plan, stage)
        transfers.obey(load_order(2, PAGES, NUMBERS, saved.checksums, saved.cuts))
        (report,) = await_reports(transfers)
        assert report.num_pages == (1 if stage == layer else 3)
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


@pytest.mark.parametrize("saved_by", [None, (3,)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_a_pool_rests_from_the_moment_that_transfers_are_cancelled(
    seed: int, saved_by: tuple[int, ...] | None
) -> None:
    """Many cancels at random moments of loads and saves. After each, all pages are written anew, as
    steps would; a late load would change them, a late save would be seen with its new bytes."""
    random, saved = Random(seed), Saved(counts=saved_by)
    store = MemoryStore(
        lambda: time.sleep(random.choice([0.0, 0.0, 1e-5, 3e-4])),
        groups_layers=saved.store.groups_layers,
    )
    store.objects = saved.store.objects
    originals = dict(store.objects)
    kv_pool = filled_pool(range(3), saved.shapes, 2)
    transfers = start(kv_pool, store)
    memory = [pages for layer in range(3) for pages in kv_pool.pages(layer)]
    loaded = set()
    for turn in range(60):
        for pages in memory:
            pages.view(torch.uint8).fill_(turn)
        transfers.obey(load_order(3 * turn, PAGES, NUMBERS, saved.checksums, saved.cuts))
        # Pages of this turn under names of this turn.
        transfers.obey(save_order(3 * turn + 1, [1, 2], [1000 + turn, 2000 + turn]))
        transfers.obey(load_order(3 * turn + 2, [3], [11], saved.checksums[:3], saved.cuts))
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
    assert originals.items() <= store.objects.items()
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
