"""The grid of policies: what counts as a loss, and that a run in parts ends with the same rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.forecasts import policy_grid
from benchmark.forecasts.grid_cells import MACHINES, Cell, Load, cells
from benchmark.forecasts.grid_report import losses, means, trades


def row(policy: str, **changes: float) -> dict[str, Any]:
    measured = {"total_tokens_per_s": 1000.0, "ttft_ms": 100.0, "tpot_ms": 20.0}
    measured |= {"target_share": 0.9, "bubble_share": 0.1, "step_tokens": 50.0}
    return {"cell": "one", "policy": policy, **measured, **changes}


@pytest.mark.parametrize(
    ("other", "is_lost"),
    [
        ({"ttft_ms": 97.0}, True),
        ({"ttft_ms": 99.0}, False),  # within the tolerance
        ({"ttft_ms": 50.0, "tpot_ms": 20.3}, False),  # a trade
        ({"ttft_ms": 50.0, "tpot_ms": 20.05}, True),
        ({"total_tokens_per_s": 1030.0, "ttft_ms": float("nan")}, True),
        ({"target_share": 0.93, "tpot_ms": 30.0}, True),
        ({"target_share": 0.91}, False),
    ],
)
def test_a_cell_is_lost_to_a_policy_that_is_better_without_being_worse(
    other: dict[str, float], is_lost: bool
) -> None:
    found = losses([row("own"), row("other", **other)], "own")
    assert [line[1] for line in found] == ["other"] * is_lost


def test_there_are_some_hundred_and_thirty_cells_of_different_names() -> None:
    names = [cell.name for cell in cells()]
    assert len(names) == len(set(names)) == 130


def test_a_run_leaves_out_the_rows_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Cell(MACHINES[0], 2, Load("two clients", (16, 4), clients=2))
    monkeypatch.setattr(policy_grid, "cells", lambda: [small])
    path = tmp_path / "rows.jsonl"
    arguments = ["--rows", str(path), "--out", str(tmp_path)]
    assert policy_grid.main([*arguments, "--policies", "sarathi", "--seconds", "-1"]) == 1
    assert policy_grid.main([*arguments, "--policies", "sarathi"]) == 0
    assert policy_grid.main([*arguments, "--policies", "sarathi,throttle-time"]) == 0
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [one["policy"] for one in rows] == ["sarathi", "throttle-time"]
    assert all(one["num_failed"] == 0 and one["total_tokens_per_s"] > 0 for one in rows)
    assert list(tmp_path.glob("*_policy_grid.md"))
    # Of a case with a wrong forecast only the policy that asks for one is missing.
    case = ["--policies", "sarathi,throttle-time", "--case", "layers +20%"]
    assert policy_grid.main([*arguments, *case]) == 0
    added = path.read_text(encoding="utf-8").splitlines()[2:]
    assert [json.loads(line)["policy"] for line in added] == ["throttle-time"]


def test_the_best_of_a_measure_is_named_with_its_price() -> None:
    rows = [
        row("own", e2e_ms=1000.0),
        row("early", ttft_ms=90.0, tpot_ms=22.0, e2e_ms=1100.0),
        row("near", total_tokens_per_s=1015.0, e2e_ms=1000.0),
    ]
    (line,) = trades(rows, "own")
    assert line[:3] == ("one", "TTFT", "early")
    assert line[3:] == ("+0.0%", "+10.0%", "-10.0%", "-10.0%", "90%, 90%")


def test_seeds_are_judged_by_their_means() -> None:
    rows = [
        *(row("own", seed=seed, ttft_ms=100.0, e2e_ms=1.0) for seed in (0, 1)),
        *(row("other", seed=seed, ttft_ms=ttft, e2e_ms=1.0) for seed, ttft in ((0, 90), (1, 110))),
    ]
    assert [(one["policy"], one["ttft_ms"]) for one in means(rows)] == [
        ("own", 100.0),
        ("other", 100.0),
    ]
    assert losses(rows[::2], "own") and not losses(means(rows), "own")
    assert len(trades(rows[::2], "own")) == 1 and not trades(means(rows), "own")
