"""Goodput against a count by hand, and against what SGLang's load generator makes of the same."""

import math
from random import Random
from types import SimpleNamespace

import pytest
from sglang.benchmark.goodput import calculate_goodput

from sgl_pipeline.goodput import LatencyTarget, RequestLatency, goodput


def test_limits_may_be_reached_and_not_passed() -> None:
    target = LatencyTarget(ttft_ms=500.0, tpot_ms=50.0)
    assert target.is_met(RequestLatency(500.0, 50.0))
    assert not target.is_met(RequestLatency(500.1, 50.0))
    assert not target.is_met(RequestLatency(500.0, 50.1))


def test_a_request_that_failed_meets_no_target() -> None:
    assert not LatencyTarget().is_met(None)
    assert LatencyTarget().is_met(RequestLatency(1e9, 1e9))
    assert goodput([None, RequestLatency(1.0, 1.0)], LatencyTarget()) == 0.5


def test_an_answer_of_one_token_has_no_time_per_token_to_miss() -> None:
    one = RequestLatency.of(first_token_ms=900.0, total_ms=900.0, output_tokens=1)
    assert one.tpot_ms is None
    assert LatencyTarget(ttft_ms=1000.0, tpot_ms=1e-9).is_met(one)
    assert not LatencyTarget(ttft_ms=800.0, tpot_ms=1e-9).is_met(one)


def test_time_per_token_is_that_of_the_tokens_after_the_first() -> None:
    assert RequestLatency.of(100.0, 400.0, 4) == RequestLatency(100.0, 100.0)


@pytest.mark.parametrize("limits", [("ttft",), ("tpot",), ("ttft", "tpot")])
def test_it_is_the_share_that_bench_serving_counts(limits: tuple[str, ...]) -> None:
    random = Random(7)
    slos = {name: {"ttft": 400.0, "tpot": 40.0}[name] for name in limits}
    target = LatencyTarget(**{f"{name}_ms": ms for name, ms in slos.items()})
    outputs, latencies, num_met = [], [], 0
    for _ in range(400):
        ttft_s, tokens = random.uniform(0.2, 0.6), random.choice([1, 2, 30])
        gap_s = random.uniform(0.02, 0.06)
        total_s = ttft_s + (tokens - 1) * gap_s
        success = random.random() < 0.9
        outputs.append(
            SimpleNamespace(success=success, ttft=ttft_s, latency=total_s, output_len=tokens)
        )
        one = RequestLatency.of(ttft_s * 1e3, total_s * 1e3, tokens)
        latencies.append(one if success else None)
        in_ttft = ttft_s <= 0.4 or "ttft" not in limits
        in_tpot = tokens == 1 or gap_s <= 0.04 or "tpot" not in limits
        num_met += success and in_ttft and in_tpot
    assert 0.05 < num_met / 400 < 0.95
    share = goodput(latencies, target)
    assert share == num_met / 400
    assert math.isclose(share, calculate_goodput(outputs, slos, 1.0).slo_attainment)
