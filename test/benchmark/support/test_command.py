"""The skeleton of a benchmark's command: what it prints and saves, and its exit code."""

import json
from pathlib import Path

import pytest

from benchmark.support.command import Command, Options, Report, names_of
from sgl_pipeline.errors import ConfigurationError

MODULE = "benchmark.moves.sample"


def report(*problems: str) -> Report:
    return Report(
        name="sample",
        texts=["| a table |", ""],
        facts={"load": {"clients": "8"}},
        record={"rates": [1.5]},
        problems=problems,
        draw=lambda path: (path.write_text("<svg/>"), None)[1],
    )


def test_a_report_is_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = Command(MODULE, "What it measures.", rounds=3, folder=tmp_path)
    asked: list[Options] = []

    def measure(options: Options) -> Report:
        asked.append(options)
        return report()

    assert command.run(measure, ["--rounds", "2"]) == 0
    assert asked[0].rounds == 2
    assert "| a table |" in capsys.readouterr().out
    paths = {path.suffix: path for path in tmp_path.iterdir()}
    assert set(paths) == {".json", ".md", ".svg"}
    record = json.loads(paths[".json"].read_text())
    assert record["command"].startswith(f"python -m {MODULE}")
    assert record["load"] == {"clients": "8"}
    assert record["rates"] == [1.5]
    assert "| a table |" in paths[".md"].read_text()


def test_a_problem_is_named_in_the_page_and_is_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(MODULE, None, folder=tmp_path)
    assert command.run(lambda options: report("a token was lost"), []) == 1
    assert "FAILED: a token was lost" in capsys.readouterr().out
    assert "FAILED: a token was lost" in next(tmp_path.glob("*.md")).read_text()


def test_nothing_is_saved_where_it_is_not_wanted(tmp_path: Path) -> None:
    assert Command(MODULE, None, folder=tmp_path).run(lambda _: report(), ["--no-save"]) == 0
    assert Command(MODULE, None, saves=False, folder=tmp_path).run(lambda _: report(), []) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigurationError("no such model"), 1, "sample: error: no such model\n"),
        (KeyboardInterrupt(), 130, "sample: interrupted; nothing is saved\n"),
    ],
)
def test_what_ends_a_measurement_is_one_line(
    error: BaseException,
    code: int,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(options: Options) -> Report:
        raise error

    assert Command(MODULE, None, folder=tmp_path).run(measure, []) == code
    assert capsys.readouterr().err == line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rounds", "0"], "0 must be at least 1"),
        (["--kinds", "slow,fast"], "'fast' is unknown; choose from slow, stopped"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(MODULE, None, rounds=1)
    command.add("--kinds", type=names_of(["slow", "stopped"]))
    with pytest.raises(SystemExit, match="2"):
        command.run(lambda options: report(), words)
    assert told in capsys.readouterr().err
