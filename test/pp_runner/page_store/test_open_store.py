"""The file store as a stage reaches it, and one that it does not reach."""

import re
from pathlib import Path

import msgspec
import torch
from support.page_transfers import (
    NOWHERE,
    PLACE,
    await_reports,
    checksums_of,
    filled_pool,
    load_order,
    pool_content,
    save_order,
    shapes_of,
)

from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import PagesLoaded, UseStore

PLAN = StagePlan(0, (2,))


def test_pages_go_to_files_and_come_back(tmp_path: Path) -> None:
    place = msgspec.structs.replace(PLACE, backend="file", address=str(tmp_path / "kv"))
    shapes = shapes_of(torch.int8, num_layers=2)
    source, target = filled_pool(range(2), shapes, 1), filled_pool(range(2), shapes, 2)
    pages = [*range(source.num_pages)]
    there = PageTransfers(0, source, lambda: PLAN, lambda: True, NOWHERE)
    there.obey(UseStore(place))
    there.obey(save_order(1, pages, pages))
    (saved,) = await_reports(there)
    assert saved.message == "" and saved.num_pages == len(pages)
    back = PageTransfers(0, target, lambda: PLAN, lambda: True, NOWHERE)
    back.obey(UseStore(place))
    assert len([*tmp_path.glob("kv/*.bin")]) == len(pages)
    back.obey(load_order(1, pages, pages, checksums_of(saved), (0,)))
    assert await_reports(back)[0].message == ""
    assert pool_content(source) == pool_content(target)
    last = sorted(tmp_path.glob("kv/*_L0-2_H0.bin"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    back.obey(load_order(2, pages, pages, checksums_of(saved), (0,)))
    (report,) = await_reports(back)
    assert isinstance(report, PagesLoaded)
    assert (report.num_pages, report.is_broken) == (len(pages) - 1, True)
    there.close()
    back.close()


def test_a_disk_keeps_the_free_space_that_its_place_names(tmp_path: Path) -> None:
    pool = filled_pool(range(2), shapes_of(torch.int8), 1)
    place = msgspec.structs.replace(PLACE, backend="file", address=str(tmp_path / "kv"))
    for min_free_bytes, num_saved in ((0, 1), (1 << 60, 0)):
        transfers = PageTransfers(0, pool, lambda: PLAN, lambda: True, NOWHERE)
        transfers.obey(UseStore(msgspec.structs.replace(place, min_free_bytes=min_free_bytes)))
        transfers.obey(save_order(1, [0], [0]))
        assert await_reports(transfers)[0].num_pages == num_saved
        transfers.close()


def test_a_stage_without_its_folder_fails_its_transfers_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("not a page")
    pool = filled_pool(range(2), shapes_of(torch.int8), 1)
    transfers = PageTransfers(0, pool, lambda: PLAN, lambda: True, NOWHERE)
    transfers.obey(UseStore(msgspec.structs.replace(PLACE, backend="file", address=str(tmp_path))))
    transfers.obey(save_order(1, [0], [0]))
    transfers.obey(load_order(2, [1], [1], [0, 0]))
    for report in await_reports(transfers, 2):
        assert report.num_pages == 0
        assert re.search("holds files that are not of a store.*letter.txt", report.message)
    transfers.close()
