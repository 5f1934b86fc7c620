"""Requests are counted by whether they were within the targets in force."""

from dataclasses import asdict

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.managers.reports.goodput_metrics import GoodputMetrics
from sgl_pipeline.records.trace import RequestRecord


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def inc(self) -> None:
        self.value += 1


def request(first_token_ms: float, total_ms: float, output_tokens: int) -> RequestRecord:
    return RequestRecord(
        request_id="one",
        prompt_tokens=1,
        cached_tokens=0,
        output_tokens=output_tokens,
        num_retractions=0,
        queue_ms=0.0,
        first_token_ms=first_token_ms,
        total_ms=total_ms,
    )


ENDED = [request(100.0, 300.0, 11), request(100.0, 500.0, 11), request(900.0, 900.0, 1)]


def test_the_targets_in_force_decide() -> None:
    counters = {"true": Counter(), "false": Counter()}
    metrics = GoodputMetrics(counters)

    def counted(**targets: float) -> tuple[int, int]:
        metrics.set_target(asdict(ThrottleArgs(policy="throttle-time", **targets)))
        for counter in counters.values():
            counter.value = 0
        metrics.ended(ENDED)
        return counters["true"].value, counters["false"].value

    assert counted() == (0, 0)
    assert counted(target_tpot_ms=30.0) == (2, 1)
    assert counted(target_ttft_ms=500.0) == (2, 1)
    assert counted(target_ttft_ms=500.0, target_tpot_ms=30.0) == (1, 2)
    assert counted() == (0, 0)
