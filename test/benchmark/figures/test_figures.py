"""The figures: one computed from scratch, and every recorded one drawn again from its rows."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure as Canvas

from benchmark.figures.__main__ import known_figures, make
from benchmark.figures.figure import Options
from benchmark.figures.targets import rate_at
from benchmark.support.dated_result import read_record
from benchmark.support.paths import RESULTS

pytestmark = pytest.mark.slow

RECORDED = sorted(RESULTS.glob("*_figure_*.json*"))


def test_a_figure_is_a_picture_its_rows_and_its_words(tmp_path: Path) -> None:
    text = make(known_figures()["step_tokens"], Options(num_requests=15), tmp_path)
    record = json.loads(text.with_suffix(".json").read_text())
    assert {row["policy"] for row in record["rows"]} == {"sarathi", "throttle"}
    assert "svg" in text.with_suffix(".svg").read_text()[:300]
    words = text.read_text()
    assert "No GPU ran" in words
    assert words.count("coefficient of variation") == 2


def test_a_users_own_trace_takes_the_place_of_the_figures(tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "0,30,3\n" * 4)
    rows = known_figures()["rates"].compute(Options(trace=str(trace), num_requests=4))
    assert {row["trace"] for row in rows} == {str(trace)}
    assert {row["policy"] for row in rows} == {"throttle", "sarathi", "greedy-queue"}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_figure_is_drawn_and_worded_from_its_rows(path: Path) -> None:
    record = read_record(path)
    figure = known_figures()[record["figure"]]
    figure.draw(record["rows"], Canvas())
    lines = figure.conclude(record["rows"])
    assert lines
    recorded = path.with_name(path.name.partition(".json")[0] + ".md").read_text()
    assert all(line in recorded for line in lines)


def test_the_rate_at_an_attainment_lies_between_the_points_around_it() -> None:
    points = [{"rate_per_s": r, "target_share": s} for r, s in ((1, 1.0), (2, 0.9), (4, 0.5))]
    assert rate_at(points, 0.8) == pytest.approx(2.5)
    assert rate_at(points, 0.1) == 4.0
    assert rate_at(points[2:], 0.8) == 0.0
