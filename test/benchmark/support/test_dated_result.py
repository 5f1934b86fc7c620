"""Results that are written again as they grow."""

import json
from pathlib import Path

import pytest

from benchmark.support.dated_result import DatedResult, file_of, save_result


def test_a_result_that_grows_stays_in_its_two_files(tmp_path: Path) -> None:
    result = DatedResult("bench_gpu", "gpu_0.27b", tmp_path)
    result.write({"run": {"state": "begun"}}, {"rows": [1]}, ["first"])
    result.write({"run": {"state": "finished"}}, {"rows": [1, 2]}, ["", "second"])
    assert sorted(tmp_path.iterdir()) == [Path(f"{result.stem}.json"), Path(f"{result.stem}.md")]
    saved = json.loads(file_of(result.stem, ".json").read_text())
    assert (saved["rows"], saved["run"]) == ([1, 2], {"state": "finished"})
    text = file_of(result.stem, ".md").read_text()
    assert "run: state finished" in text and text.endswith("\n\nsecond\n") and "first" not in text


def test_a_write_that_is_cut_short_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = DatedResult("bench_gpu", "gpu", tmp_path)
    result.write({}, {"rows": [1]}, [])
    write_bytes = Path.write_bytes

    def write_half(path: Path, content: bytes) -> int:
        write_bytes(path, content[: len(content) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match="no space"):
        result.write({}, {"rows": [1, 2]}, [])
    assert json.loads(result.stem.with_suffix(".json").read_text())["rows"] == [1]


def test_results_of_one_minute_do_not_share_files(tmp_path: Path) -> None:
    stems = {save_result("bench_gpu", "gpu", {}, {}, [], tmp_path / "new") for _ in range(3)}
    assert len(stems) == 3
