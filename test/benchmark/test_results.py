"""The index of the stored results is complete, and no record is large."""

import json
import re
from pathlib import Path

import pytest

from benchmark.pictures.readme_plot import TARGET, measured_ratios, ratio_table, save_plot
from benchmark.support.dated_result import MAX_RECORD_BYTES, read_record, write_record
from benchmark.support.paths import RESULTS

INDEX = (RESULTS / "README.md").read_text()
ROOT = RESULTS.parents[1]


def test_every_result_is_in_the_index_once() -> None:
    stems = {path.name.removesuffix(".gz").rpartition(".")[0] for path in RESULTS.glob("20*")}
    indexed = re.findall(r"\]\((20[\w.-]+)\.md\)", INDEX)
    assert sorted(indexed) == sorted(stems)


def test_the_claims_of_the_index_are_in_the_claims_table() -> None:
    claims = (RESULTS / "CLAIMS.md").read_text()
    named = re.findall(r"\b[GTDBP]\d+\b", INDEX)
    assert len(named) > 30
    assert [claim for claim in named if not re.search(rf"^\| .*\b{claim}\b", claims, re.M)] == []


def test_commands_of_the_index_are_modules() -> None:
    measured = INDEX.partition("## Simulated")[0]
    commands = set(re.findall(r"\| `([\w.]+)[^|]*` \|$", measured, re.M))
    assert len(commands) > 15
    for command in commands:
        path = ROOT / "benchmark" / command.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), command


def test_no_stored_record_is_large() -> None:
    paths = [path for path in RESULTS.glob("20*") if ".json" in path.suffixes]
    assert paths
    assert [path.name for path in paths if path.stat().st_size > MAX_RECORD_BYTES] == []


@pytest.mark.parametrize("num_values", [3, MAX_RECORD_BYTES])
def test_a_record_is_read_as_it_was_written_and_packed_only_if_large(
    tmp_path: Path, num_values: int
) -> None:
    stem = tmp_path / "2026-11-23_0000_x"
    stem.with_suffix(".json").write_text("of the draft before")
    record = {"rows": list(range(num_values)), "machine": {"cores": "2"}}
    path = write_record(stem, record)
    assert read_record(path) == record
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert (path.suffix == ".gz") == (num_values > 3)
    if path.suffix == ".json":
        assert json.loads(path.read_text()) == record


def test_the_readme_has_the_ratios_of_the_stored_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = ratio_table(measured_ratios()).splitlines()[2:]
    assert len(rows) == 4
    assert [row for row in rows if row not in readme] == []


def test_the_plot_is_that_of_the_stored_runs(tmp_path: Path) -> None:
    ratios = measured_ratios()
    save_plot(ratios, tmp_path / "plot.svg")
    for path in (tmp_path / "plot.svg", TARGET):
        assert ratio_table(ratios) in path.read_text()
