"""Goodput: the share of requests that are served within latency targets ("SLO attainment").

The one rule for benchmarks, simulator, tuning and metrics, the same as that of `--goodput` of
SGLang's `bench_serving`: a request that fails has missed its targets, and an answer of one token,
which has no time per output token, cannot miss a target for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RequestLatency(NamedTuple):
    """A request that was served: time to the first token, and mean time per output token after the
    first, None for an answer of one token. Milliseconds."""

    ttft_ms: float
    tpot_ms: float | None

    @classmethod
    def of(cls, first_token_ms: float, total_ms: float, output_tokens: int) -> "RequestLatency":
        """The latency by the times of the first and last token since the request came."""
        if output_tokens < 2:
            return cls(first_token_ms, None)
        return cls(first_token_ms, (total_ms - first_token_ms) / (output_tokens - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTarget:
    """Limits that a request must meet to count as served well, in milliseconds (infinity: none)."""

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf

    def __str__(self) -> str:
        limits = {"TTFT": self.ttft_ms, "TPOT": self.tpot_ms}
        named = [f"{name} {ms:g} ms" for name, ms in limits.items() if ms != math.inf]
        return ", ".join(named) or "no limit"

    def is_met(self, latency: RequestLatency | None) -> bool:
        """True if the request was served (not None) within both limits, which may be reached."""
        if latency is None or latency.ttft_ms > self.ttft_ms:
            return False
        return latency.tpot_ms is None or latency.tpot_ms <= self.tpot_ms


def goodput(latencies: Sequence[RequestLatency | None], target: LatencyTarget) -> float:
    """The share of at least one request within `target`. None stands for a request that failed."""
    return sum(map(target.is_met, latencies)) / len(latencies)
