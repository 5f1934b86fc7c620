"""The figures of returning turns, against hand-worked numbers."""

import json
import math
from dataclasses import replace

import pytest

from benchmark.tiers.turn_clients import AnsweredTurn, Answers
from benchmark.tiers.turn_report import (
    TurnRun,
    equal_answers,
    first_ttft,
    found_share,
    kept_share,
    p99_gap_ms,
    paired,
    ratio_table,
    record_of,
    returning_ttft,
    revisit_table,
    tokens_per_s,
    turn_table,
)


def turn(session: int, number: int, ttft_ms: float, *, prompt: int, cached: int) -> AnsweredTurn:
    return AnsweredTurn(
        session=session,
        turn=number,
        prompt=tuple(range(prompt)),
        output=(1, 2, 3),
        ttft_ms=ttft_ms,
        gaps_ms=(10.0 * number, 20.0),
        cached_tokens=cached,
        cached_details={"device": cached // 4, "storage": cached - cached // 4},
    )


ANSWERS = Answers(
    turns=(
        turn(0, 1, 100.0, prompt=32, cached=0),
        turn(1, 1, 300.0, prompt=32, cached=0),
        turn(0, 2, 40.0, prompt=43, cached=32),
        turn(1, 2, 20.0, prompt=43, cached=16),
    ),
    duration_s=2.0,
)
OFF = TurnRun(engine="off", round=1, answers=ANSWERS, store_mib=0.0)


def with_first_output(run: TurnRun, output: tuple[int, ...]) -> TurnRun:
    first, *rest = run.answers.turns
    return replace(run, answers=replace(run.answers, turns=(replace(first, output=output), *rest)))


def test_returning_turns_are_told_from_first_ones() -> None:
    assert (returning_ttft(OFF).mean, returning_ttft(OFF).p50) == (30.0, 30.0)
    assert returning_ttft(OFF).p99 == pytest.approx(39.8)
    assert first_ttft(OFF).mean == 200.0
    first_alone = replace(OFF, answers=replace(ANSWERS, turns=ANSWERS.turns[:2]))
    assert math.isnan(returning_ttft(first_alone).mean)
    assert "nan" not in turn_table([first_alone])


def test_throughput_counts_prompts_and_answers() -> None:
    assert tokens_per_s(OFF) == (32 + 32 + 43 + 43 + 4 * 3) / 2.0


def test_the_gaps_are_of_all_streams() -> None:
    assert p99_gap_ms(OFF) == 20.0


def test_found_tokens_are_told_apart_by_tier() -> None:
    assert found_share(ANSWERS.turns) == 48 / 150
    assert found_share(ANSWERS.turns, "device") == 12 / 150
    assert found_share(ANSWERS.turns, "storage") == 36 / 150


def test_whole_pages_of_computed_tokens_are_kept_or_not() -> None:
    # 45 tokens are computed of a conversation of 46: two pages of 16.
    after = [turn(0, 3, 1.0, prompt=50, cached=32), turn(1, 3, 1.0, prompt=50, cached=16)]
    assert kept_share(ANSWERS, Answers(tuple(after), 1.0), 16) == 48 / 64
    # More than there was before is not kept, but found in the new part.
    after[0] = replace(after[0], cached_tokens=48)
    assert kept_share(ANSWERS, Answers(tuple(after), 1.0), 16) == 48 / 64


def test_answers_are_compared_where_the_prompts_are_equal() -> None:
    assert equal_answers(OFF, OFF) == (4, 4)
    other = with_first_output(OFF, (1, 2, 4))
    assert equal_answers(other, OFF) == (3, 4)
    turns = other.answers.turns
    later = replace(turns[2], prompt=(0,), output=(9,))
    other = replace(other, answers=Answers((*turns[:2], later, turns[3]), 2.0))
    assert equal_answers(other, OFF) == (2, 3)


def test_ratios_are_of_runs_of_one_round() -> None:
    faster = replace(ANSWERS, duration_s=1.0)
    runs = [
        OFF,
        replace(OFF, engine="on", answers=faster),
        replace(OFF, engine="on", round=2, answers=faster),
        replace(OFF, round=2, answers=faster),
    ]
    assert paired(runs, "off") == {"on": [(runs[1], runs[0]), (runs[2], runs[3])]}
    table = ratio_table(runs, "off", with_reuse=True)
    assert "| on | total tok/s | 1.500 (1.000 to 2.000) | >= 1.5 |" in table
    assert "| on | mean TTFT of returning turns, times shorter | 1.000 | >= 3 |" in table
    assert "| 8 of 8 | all |" in table
    assert ">= 0.98" in ratio_table(runs, "off", with_reuse=False)
    assert "returning" not in ratio_table(runs, "off", with_reuse=False)
    assert ratio_table([OFF], "off", with_reuse=True) == ""


def test_tables_have_a_row_an_engine() -> None:
    after = Answers(
        (turn(0, 3, 5.0, prompt=50, cached=32), turn(1, 3, 7.0, prompt=50, cached=16)), 1
    )
    visited = replace(OFF, engine="on", revisit=after, revisited_by="ours --pp 1")
    assert turn_table([OFF, visited, replace(OFF, round=2)]).count("\n") == 3
    assert "| off | 2 | 30.0 | 30.0 | 39.8 | 200 |" in turn_table([OFF, replace(OFF, round=2)])
    table = revisit_table([OFF, visited], 16)
    assert table.count("\n") == 2
    assert "| on | ours --pp 1 | 1 | 75.0 % | 48.0 % | 36.0 % | 6.0 | 6.0 | 7.0 |" in table
    assert revisit_table([OFF], 16) == ""


def test_the_record_has_every_turn_without_its_tokens() -> None:
    record = json.loads(json.dumps(record_of(OFF)))
    rows = [dict(zip(record["turn_columns"], row, strict=True)) for row in record["turns"]]
    assert [row["cached_tokens"] for row in rows] == [0, 0, 32, 16]
    assert rows[2]["cached_details"] == {"device": 8, "storage": 24}
    assert rows[2]["prompt_tokens"] == 43
