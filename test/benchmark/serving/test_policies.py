"""What the comparison of policies says of made-up runs."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest
from support.step_records import step_record

from benchmark.serving import policies_report
from benchmark.serving.policies import FIRST, UnderPolicy, limit_problem, main
from benchmark.serving.policies_report import beaten_table, best_table
from benchmark.support.dated_result import write_record
from benchmark.support.serving_report import METRICS, Run
from sgl_pipeline.goodput import RequestLatency

DEFAULT = "throttle-time"


def run(policy: str, round_number: int, tokens_per_s: float, ttft_ms: float) -> Run:
    judged = {"total_throughput": tokens_per_s, "mean_ttft_ms": ttft_ms}
    return Run(
        engine=policy,
        round=round_number,
        input_tokens=100,
        output_tokens=20,
        duration_s=1.0,
        metrics=dict.fromkeys(METRICS, 50.0) | judged,
    )


def rows(runs: Sequence[Run]) -> list[list[str]]:
    return cells(best_table({"offline": runs}, DEFAULT))


def cells(table: str) -> list[list[str]]:
    lines = table.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_best_has_the_most_tokens_and_the_least_time() -> None:
    # The second round comes first, as where two commands measured them.
    runs = [
        *(run("sarathi", 2, 400.0, 300.0), run(DEFAULT, 2, 440.0, 200.0)),
        *(run(DEFAULT, 1, 380.0, 200.0), run("sarathi", 1, 600.0, 300.0)),
        *(run(DEFAULT, 3, 400.0, 240.0), run("sarathi", 3, 500.0, 150.0)),
    ]
    tokens, first, between = rows(runs)
    assert tokens[1:] == ["total tok/s", "sarathi", "500.0", "400.0", "20.0", "36.7, -10.0, 20.0"]
    assert first[1:] == ["mean TTFT ms", DEFAULT, "200.0", "200.0", "0.0", "0.0, 0.0, 0.0"]
    # Both the same: the default is as good as the best.
    assert between[1:4] == ["mean TPOT ms", DEFAULT, "50.0"]


def test_a_slower_first_token_is_behind() -> None:
    first = rows([run("sarathi", 1, 1.0, 200.0), run(DEFAULT, 1, 1.0, 230.0)])[1]
    assert first[2:] == ["sarathi", "200.0", "230.0", "15.0", "15.0"]


def test_goodput_is_within_the_medians_of_all_requests() -> None:
    late, soon = RequestLatency(300.0, 40.0), RequestLatency(100.0, 20.0)
    one_token = RequestLatency(200.0, None)
    own = replace(run(DEFAULT, 1, 1.0, 1.0), latencies=(late, late, one_token))
    other = replace(run("sarathi", 1, 1.0, 1.0), latencies=(soon, soon, late))
    # TTFT has the median 250 ms, TPOT 40: one of three requests against two of three.
    shares = rows([own, other])[3]
    assert shares[1:] == [
        *("% within TTFT 250 ms, TPOT 40 ms", "sarathi"),
        *("66.7", "33.3", "33.3", "33.3"),
    ]


def test_a_policy_beats_the_default_where_it_is_better_and_nowhere_worse() -> None:
    own = [run(DEFAULT, number, 100.0, 200.0) for number in (1, 2, 3)]
    gains, losses = (103.0, 101.0, 104.0), (200.0, 200.5, 201.0)
    faster = [
        run("sarathi", number, tokens_per_s, ttft_ms)
        for number, tokens_per_s, ttft_ms in zip((3, 1, 2), gains, losses, strict=True)
    ]
    (row,) = cells(beaten_table({"offline": [*own, *faster]}, DEFAULT))
    assert row == ["offline", "sarathi", "+3.0 (3 of 3)", "-0.2 (0 of 3)", "+0.0 (0 of 3)"]
    # A first token that is 1 % later is a trade.
    later = [run("no-ut", one.round, 110.0, 202.0) for one in own]
    alike = [run("throttle", one.round, 102.0, 200.0) for one in own]
    told = beaten_table({"offline": [*own, *later, *alike]}, DEFAULT)
    assert told == "No policy beats `throttle-time` at any load."


def test_rounds_of_two_records_count_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = []
    for name, tokens_per_s in (("first", 90.0), ("second", 110.0)):
        runs = [asdict(run(policy, 1, tokens_per_s, 200.0)) for policy in (DEFAULT, "sarathi")]
        path = write_record(tmp_path / name, {"runs": {"offline": runs}})
        records.append(str(path))
    assert policies_report.main(records) == 0
    said = capsys.readouterr().out
    assert "| offline | total tok/s | throttle-time | 100.0 | 100.0 | 0.0 | 0.0, 0.0 |" in said


def test_a_file_that_is_no_record_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_record(tmp_path / "other", {"steps": []})
    for path in (other, tmp_path / "missing.json"):
        assert policies_report.main([str(path)]) == 1
        assert f"{path} is no record of `policies`" in capsys.readouterr().err


def test_a_policy_is_changed_before_its_load() -> None:
    flags = UnderPolicy(FIRST, "no-wt").client_flags()
    assert flags == ["--under-policy", "no-wt", *FIRST.client_flags()]


def test_steps_must_be_limited_as_their_policy_does() -> None:
    by_tokens = step_record(0)
    by_time = msgspec.structs.replace(by_tokens, budget_ms=12.0)
    assert by_tokens.budget_ms is None
    assert limit_problem(DEFAULT, [by_time, by_time]) is None
    assert limit_problem("sarathi", [by_tokens]) is None
    told = "throttle-time: 1 of 2 steps were limited by time"
    assert limit_problem(DEFAULT, [by_tokens, by_time]) == told
    assert limit_problem("sarathi", [by_time]) == "sarathi: 1 of 1 steps were limited by time"


def test_the_default_policy_must_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--policies", "throttle,sarathi", "--no-save"]) == 1
    assert "must name throttle-time" in capsys.readouterr().err
