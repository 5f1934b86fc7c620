"""Ratios of prefill and decode apart to one pipeline, against hand-worked answers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.disaggregation.apart_plot import draw, powers_of_two
from benchmark.disaggregation.apart_report import (
    ALL_KINDS,
    APART,
    GAP_P50,
    GAP_P99,
    OUTPUT_RATE,
    TOGETHER,
    TOTAL_RATE,
    TPOT_P50,
    TTFT_P50,
    Figure,
    LoadRun,
    busy_table,
    compare_answers,
    figure_table,
    figures,
    ratios,
    record_of,
)
from benchmark.disaggregation.mixed_clients import Answered
from benchmark.disaggregation.mixed_load import Place


def answer(number: int, *moments_s: float, kind: str = "streams", sent_s: float = 0.0) -> Answered:
    """One token at each moment."""
    return Answered(
        place=Place("load", 1, kind, 0, number),
        input_tokens=10,
        sent_s=sent_s,
        moments_s=moments_s,
        tokens=tuple(range(1, len(moments_s) + 1)),
        output=tuple(range(len(moments_s))),
    )


RUN = LoadRun(
    setup=TOGETHER,
    load="load",
    round=1,
    seconds=4.0,
    # The last part comes after the load's end, as does all of the last answer.
    answers=(
        answer(0, 0.5, 0.6, 0.8),
        answer(1, 1.5, 1.8, 4.5, sent_s=1.0),
        answer(0, 4.2, sent_s=3.0, kind="prompts"),
    ),
    busy=(0.5, 1.0),
)


def slower(run: LoadRun, factor: float, setup: str = APART) -> LoadRun:
    """The same, all of it later."""
    answers = tuple(
        replace(
            one,
            sent_s=one.sent_s * factor,
            moments_s=tuple(moment * factor for moment in one.moments_s),
        )
        for one in run.answers
    )
    return replace(run, setup=setup, answers=answers, seconds=run.seconds * factor)


def test_figures_count_within_the_seconds_of_the_load() -> None:
    found = figures(RUN)
    assert found[Figure("load", "streams", TTFT_P50)] == pytest.approx(500.0)
    assert found[Figure("load", "prompts", TTFT_P50)] == pytest.approx(1200.0)
    assert found[Figure("load", "streams", GAP_P50)] == pytest.approx(200.0)
    assert found[Figure("load", "streams", GAP_P99)] == pytest.approx(298.0)
    # Means of 150 and 1500 ms.
    assert found[Figure("load", "streams", TPOT_P50)] == pytest.approx(825.0)
    assert not {Figure("load", "prompts", name) for name in (GAP_P50, TPOT_P50)} & set(found)
    assert found[Figure("load", ALL_KINDS, OUTPUT_RATE)] == 5 / 4
    assert found[Figure("load", ALL_KINDS, TOTAL_RATE)] == (20 + 5) / 4


def test_ratios_are_within_a_round() -> None:
    second = replace(RUN, round=2)
    alone = replace(RUN, round=3, setup=APART)
    runs = [RUN, slower(RUN, 2.0), second, slower(second, 4.0), alone]
    found = ratios(runs)
    assert found[Figure("load", "streams", GAP_P99)] == pytest.approx([2.0, 4.0])
    assert found[Figure("load", ALL_KINDS, TOTAL_RATE)] == pytest.approx([0.5, 0.25])
    (row,) = [
        line for line in figure_table(runs).splitlines() if "streams | between tokens p99" in line
    ]
    assert row.endswith("| 298 | 596 (298 to 1192) | 2.00, 4.00 | 3.00 (2.00 to 4.00) |")
    assert "| load | together | 50% | 100% |" in busy_table(runs)


def test_answers_are_compared_as_far_as_both_go() -> None:
    cut = replace(RUN.answers[0], output=(0, 1))
    apart = replace(RUN, setup=APART, answers=(cut, RUN.answers[1]))
    assert compare_answers([RUN, apart]) == (2, 2 + 3, [])
    wrong = replace(apart, answers=(replace(cut, output=(0, 7)),))
    equality = compare_answers([RUN, wrong])
    assert (equality.answers, equality.tokens) == (1, 2)
    assert equality.unequal == [str(cut.place)]


def test_record_and_plot_can_be_written(tmp_path: Path) -> None:
    record = json.loads(json.dumps(record_of(RUN)))
    assert record["requests"][1] == ["streams", 0, 1, 1.0, 500.0, 4.5, 3]
    path = tmp_path / "plot.svg"
    draw(ratios([RUN, slower(RUN, 2.0)]), "a CPU of its own", path)
    assert path.read_text().startswith("<?xml")


def test_ticks_are_powers_of_two_around_all_ratios() -> None:
    assert powers_of_two([0.0, 0.3, 1.0, 2.5]) == [0.25, 0.5, 1.0, 2.0, 4.0]
