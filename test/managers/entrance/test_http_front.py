import asyncio
from pathlib import Path

import pytest
from sglang.srt.managers.load_snapshot import (
    LoadSnapshot,
    ShmLoadSnapshotReader,
    ShmLoadSnapshotWriter,
)

from sgl_pipeline.managers.entrance.http_front import HttpTokenizerManager


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
