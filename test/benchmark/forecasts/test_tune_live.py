"""What tuning promised beside what came of it: latencies as the server has them, and the tables."""

from typing import Any

from benchmark.forecasts.tune_live import LATENCIES, TunedRun, knob_table, outcome, promise_table
from sgl_pipeline.records.trace import RequestRecord


def ended(first_token_ms: float, total_ms: float, output_tokens: int) -> RequestRecord:
    return RequestRecord(
        request_id="one",
        prompt_tokens=8,
        cached_tokens=0,
        output_tokens=output_tokens,
        num_retractions=0,
        queue_ms=1.0,
        first_token_ms=first_token_ms,
        total_ms=total_ms,
    )


def test_a_request_is_in_time_when_both_latencies_are_met() -> None:
    records = [
        ended(100.0, 500.0, 5),  # exactly what is wanted
        ended(101.0, 201.0, 5),  # the first token is late
        ended(50.0, 454.0, 5),  # the others are, at 101 ms each
        ended(40.0, 40.0, 1),  # has no others
    ]
    share, latencies = outcome(records, ttft_ms=100.0, tpot_ms=100.0)
    assert share == 0.5
    assert latencies == {
        "ttft_ms p50": 100.0,
        "ttft_ms p90": 101.0,
        "tpot_ms p50": 100.0,
        "tpot_ms p90": 101.0,
    }


def run(knobs: str, round_number: int, share: float, ms: float) -> TunedRun:
    return TunedRun(
        round_number=round_number,
        knobs=knobs,
        target_share=share,
        latencies=dict.fromkeys(LATENCIES, ms),
        tokens_per_s=100.0,
    )


def predicted(share: float, ms: float) -> dict[str, Any]:
    ranks = {"p50": ms, "p90": 2 * ms}
    return {"target_share": share, "ttft_ms": ranks, "tpot_ms": ranks}


def test_each_promise_stands_beside_the_runs_of_its_setting() -> None:
    told = {"now": predicted(0.25, 900.0), "proposed": predicted(0.75, 300.0)}
    runs = [
        run("as started", 1, 0.2, 1000.0),
        run("proposed", 1, 0.7, 400.0),
        run("proposed", 2, 0.9, 200.0),
        run("as started", 2, 0.3, 800.0),
    ]
    lines = promise_table(told, runs).splitlines()
    assert lines[2] == "| in time, % | 25 | 25.0 (20.0 to 30.0) | 75 | 80.0 (70.0 to 90.0) |"
    assert lines[3] == "| ttft_ms p50 | 900 | 900 (800 to 1000) | 300 | 300 (200 to 400) |"
    assert lines[6].startswith("| tpot_ms p90 | 1800 | 900 ")


def test_what_is_to_change_stands_beside_what_was_set() -> None:
    told = {
        "knobs_in_force": {"max_prefill_tokens": 32, "accounting": "radix"},
        "knobs": {"max_prefill_tokens": 128},
    }
    assert knob_table(told).splitlines()[2:] == ["| max_prefill_tokens | 32 | 128 |"]
