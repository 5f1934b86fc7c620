"""What the comparison of policies says of made-up runs."""

from collections.abc import Sequence

import msgspec
import pytest
from support.step_records import step_record

from benchmark.serving.policies import FIRST, UnderPolicy, limit_problem, main
from benchmark.serving.policies_report import best_table
from benchmark.support.serving_report import METRICS, Run

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
    lines = best_table({"offline": runs}, DEFAULT).splitlines()[2:]
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
