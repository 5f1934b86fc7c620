"""The file store as a stage reaches it, and what is not built."""

from pathlib import Path

import msgspec
import pytest
import torch
from support.page_transfers import (
    PLACE,
    await_reports,
    checksums_of,
    filled_pool,
    load_order,
    pool_content,
    save_order,
    shapes_of,
)

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.page_store.open_store import open_store
from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import PagesLoaded, UseStore

CPU = torch.device("cpu")
PLAN = StagePlan(0, (2,))


def test_pages_go_to_files_and_come_back(tmp_path: Path) -> None:
    place = msgspec.structs.replace(PLACE, backend="file", address=str(tmp_path / "kv"))
    shapes = shapes_of(torch.int8)
    source, target = filled_pool(range(2), shapes, 1), filled_pool(range(2), shapes, 2)
    pages = [*range(source.num_pages)]
    there = PageTransfers(0, source, CPU, lambda: PLAN, lambda: True)
    there.obey(UseStore(place))
    there.obey(save_order(1, pages, pages))
    (saved,) = await_reports(there)
    assert saved.message == "" and saved.num_pages == len(pages)
    back = PageTransfers(0, target, CPU, lambda: PLAN, lambda: True)
    back.obey(UseStore(place))
    back.obey(load_order(1, pages, pages, checksums_of(saved)))
    assert await_reports(back)[0].message == ""
    assert pool_content(source) == pool_content(target)
    last = sorted(tmp_path.glob("kv/*_L1-2_H0.bin"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    back.obey(load_order(2, pages, pages, checksums_of(saved)))
    (report,) = await_reports(back)
    assert isinstance(report, PagesLoaded)
    assert (report.num_pages, report.is_broken) == (len(pages) - 1, True)
    there.close()
    back.close()


def test_what_is_not_built_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--hicache-storage-backend mooncake .* use file"):
        open_store(msgspec.structs.replace(PLACE, backend="mooncake"), CPU)
    with pytest.raises(ConfigurationError, match="--device cuda is not built"):
        open_store(msgspec.structs.replace(PLACE, backend="file"), torch.device("cuda"))
