"""Pages in the memory of the stages, end to end: sessions, records, and what is overwritten.

On a CPU, where it is of no use, since the pool is host memory itself; the copies of a GPU have not
run on hardware.
"""

from array import array
from collections.abc import Iterator, Sequence
from random import Random

import msgspec
import pytest
import torch
from support.page_transfers import (
    NOWHERE,
    NUM_PAGES,
    PLACE,
    await_reports,
    filled_pool,
    hash_of,
    page_content,
    save_order,
    shapes_of,
)

from sgl_pipeline.kv_store import host_objects
from sgl_pipeline.kv_store.host_pages import HostPages
from sgl_pipeline.kv_store.open_store import HOST_BACKEND, open_pages
from sgl_pipeline.page_record import PageRecord
from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.step_order import INT32
from sgl_pipeline.wire.store_orders import (
    UINT32,
    LoadPages,
    PagesLoaded,
    PagesSaved,
    StorePlace,
    UseStore,
)

SHAPES = shapes_of(torch.bfloat16)
SPLIT, OTHER_SPLIT = StagePlan(0, (1, 2)), StagePlan(1, (2, 1))


def place_of(host_pages: int) -> StorePlace:
    return msgspec.structs.replace(PLACE, backend=HOST_BACKEND, host_pages=host_pages)


class Server:
    """Two stages and the records of the scheduler process; page numbers stand for tokens."""

    def __init__(self, host_pages: int) -> None:
        self.plan = SPLIT
        self.place = place_of(host_pages)
        self.records = open_pages(self.place, 3)
        self.pools = [filled_pool(range(3), SHAPES, stage) for stage in range(2)]
        self.stages = [
            PageTransfers(stage, self.pools[stage], lambda: self.plan, lambda: True, NOWHERE)
            for stage in range(2)
        ]
        self.use(self.place)
        self._transfer = 0

    def use(self, place: StorePlace) -> None:
        for stage in self.stages:
            stage.obey(UseStore(place))

    def fill(self, page: int, number: int) -> None:
        """Computes the page of `number`: its content is a function of it."""
        for stage in range(2):
            for layer in self.plan.layers_of(stage):
                for part in self.pools[stage].rows(layer):
                    seed = torch.Generator().manual_seed(100 * number + layer)
                    size = part.shape[1:]
                    part[page] = torch.randint(256, size, generator=seed, dtype=torch.uint8)

    def contents(self, page: int) -> list[bytes]:
        return [
            page_content(self.pools[stage], layer, page)
            for stage in range(2)
            for layer in self.plan.layers_of(stage)
        ]

    def save(self, pages: Sequence[int], numbers: Sequence[int]) -> None:
        self._transfer += 1
        checksums, sizes = [array(UINT32) for _ in pages], []
        for stage in self.stages:
            stage.obey(save_order(self._transfer, pages, numbers))
        for stage in self.stages:
            (report,) = await_reports(stage)
            assert isinstance(report, PagesSaved) and report.message == ""
            column, count = array(UINT32, report.checksums), len(report.sizes)
            for index, of_page in enumerate(checksums):
                of_page.extend(column[index * count : (index + 1) * count])
            sizes += report.sizes
        self.records.commit([
            PageRecord(hash_of(number), tuple(sizes), of_page.tobytes())
            for number, of_page in zip(numbers, checksums, strict=True)
        ])  # fmt: skip

    def load(self, pages: Sequence[int], numbers: Sequence[int]) -> list[PagesLoaded]:
        """Loads what of `numbers` the records have; drops a page that is broken."""
        found = self.records.lookup([hash_of(number) for number in numbers])
        if not found:
            return []
        self._transfer += 1
        order = LoadPages(
            self._transfer,
            array(INT32, pages[: len(found)]).tobytes(),
            b"".join(record.page_hash for record in found),
            b"".join(record.checksums for record in found),
            tuple(record.cuts for record in found),
        )
        for stage in self.stages:
            stage.obey(order)
        reports = []
        for stage in self.stages:
            (report,) = await_reports(stage)
            assert isinstance(report, PagesLoaded)
            reports.append(report)
            if report.is_broken:
                self.records.drop(found[report.num_pages].page_hash)
        return reports


@pytest.fixture(autouse=True)
def _any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_objects, "MIN_FREE_BYTES", 0)


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server(host_pages=6)
    yield one
    for stage in one.stages:
        stage.close()


def test_pages_leave_the_pool_and_come_back(server: Server) -> None:
    for page, number in ((1, 21), (4, 22)):
        server.fill(page, number)
    computed = [server.contents(page) for page in (1, 4)]
    server.save([1, 4], [21, 22])
    reports = server.load([6, 3], [21, 22, 23])
    assert [report.num_pages for report in reports] == [2, 2]
    assert [server.contents(page) for page in (6, 3)] == computed


def test_interrupts_keep_what_is_there(server: Server) -> None:
    """As after a layer move that was abandoned, or a stage elsewhere that was lost."""
    server.fill(1, 21)
    server.save([1], [21])
    for stage in server.stages:
        stage.cancel()
    server.use(server.place)
    assert [report.num_pages for report in server.load([2], [21])] == [1, 1]
    assert server.contents(2) == server.contents(1)


def test_a_page_that_a_stage_has_overwritten_costs_one_load(server: Server) -> None:
    server.fill(1, 21)
    server.save([1], [21])
    for number in range(30, 36):
        server.fill(2, number)
        server.save([2], [number])
    assert isinstance(server.records, HostPages)
    record = PageRecord(hash_of(21), (1, 1, 1), array(UINT32, [1, 1, 2]).tobytes())
    server.records.commit([record])  # it should have been forgotten by now
    before = server.contents(5)
    reports = server.load([5], [21])
    assert [(report.num_pages, report.is_broken) for report in reports] == [(0, True)] * 2
    assert server.contents(5) == before
    assert server.load([5], [21]) == []


def test_a_layer_that_has_moved_is_missing_at_its_new_stage_until_it_is_saved(
    server: Server,
) -> None:
    server.fill(1, 21)
    server.save([1], [21])
    for stage in server.stages:
        stage.cancel()
    server.plan = OTHER_SPLIT
    server.use(server.place)
    first, second = server.load([2], [21])
    assert (first.is_broken, second.num_pages) == (True, 1)
    server.fill(1, 21)
    server.save([1], [21])
    assert [report.num_pages for report in server.load([2], [21])] == [1, 1]
    assert server.contents(2) == server.contents(1)


def test_memory_of_another_size_is_empty(server: Server) -> None:
    server.fill(1, 21)
    server.save([1], [21])
    server.use(place_of(7))
    assert [report.is_broken for report in server.load([2], [21])] == [True, True]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_loaded_is_right(seed: int, server: Server) -> None:
    """More pages than there is room for come and go; half of the room is records'."""
    random, num_loaded = Random(seed), 0
    for _ in range(150):
        number, page = random.randrange(8), random.randrange(NUM_PAGES)
        reports = server.load([page], [number])
        if not reports:
            server.fill(page, number)
            server.save([page], [number])
        elif all(report.num_pages for report in reports):
            num_loaded += 1
            loaded = server.contents(page)
            server.fill(page, number)
            assert server.contents(page) == loaded
    assert num_loaded > 20
