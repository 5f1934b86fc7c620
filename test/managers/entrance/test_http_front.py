import asyncio
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import ClearHiCacheReqInput, ClearHiCacheReqOutput
from sglang.srt.managers.load_snapshot import (
    LoadSnapshot,
    ShmLoadSnapshotReader,
    ShmLoadSnapshotWriter,
)

from sgl_pipeline.managers.entrance.http_front import HttpTokenizerManager


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(None, "--hicache-storage-backend file"), ("file", "another change of .* file is under way")],
)
def test_a_store_that_was_not_cleared_is_not_called_cleared(
    backend: str | None, reason: str
) -> None:
    replies = [ClearHiCacheReqOutput(success=True), ClearHiCacheReqOutput(success=False)]

    async def ask_scheduler(message: ClearHiCacheReqInput) -> list[ClearHiCacheReqOutput]:
        return [replies.pop(0)]

    manager = HttpTokenizerManager.__new__(HttpTokenizerManager)
    manager.auto_create_handle_loop = lambda: None
    manager.clear_hicache_storage_communicator = ask_scheduler
    manager.config_value = {"hicache_storage_backend": backend}.__getitem__
    assert asyncio.run(manager.clear_hicache_storage()).success
    with pytest.raises(ValueError, match=f"nothing was cleared: .*{reason}"):
        asyncio.run(manager.clear_hicache_storage())


def test_rooms_are_asked_for_on_a_prefill_server_alone() -> None:
    async def state() -> list[dict[str, Any]]:
        return [{"rooms": {"wanted_requests": 3}}]

    manager: Any = HttpTokenizerManager.__new__(HttpTokenizerManager)
    manager.get_internal_state = state
    for mode, num_rooms in (("prefill", 3), ("decode", 0), ("null", 0)):
        manager.disaggregation_mode = DisaggregationMode(mode)
        assert asyncio.run(manager.num_wanted_rooms()) == num_rooms


def test_loads_are_read_and_an_unknown_section_is_an_error_in_time(tmp_path: Path) -> None:
    path = str(tmp_path / "loads")
    manager = HttpTokenizerManager.__new__(HttpTokenizerManager)
    manager.auto_create_handle_loop = lambda: None
    manager.load_snapshot_reader = ShmLoadSnapshotReader(path, dp_size=1)
    assert asyncio.run(manager.get_loads()) == []
    writer = ShmLoadSnapshotWriter(path, dp_size=1, dp_rank=0)
    writer.write(LoadSnapshot(num_waiting_reqs=3))
    (load,) = asyncio.run(manager.get_loads(["core"]))
    assert load.num_waiting_reqs == 3
    with pytest.raises(ValueError, match="include: everything"):
        asyncio.run(manager.get_loads(["everything"]))
    writer.close()
