"""Counts the requests that are served within the targets in force, for `/metrics`."""

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

from sgl_pipeline.goodput import LatencyTarget, RequestLatency
from sgl_pipeline.records.throttle_change import Knob
from sgl_pipeline.records.trace import RequestRecord


class Counter(Protocol):
    """The part of Prometheus's that is used."""

    def inc(self) -> None: ...


class GoodputMetrics:
    """`counters` are for requests within the targets ("true") and beyond one ("false"). Nothing is
    counted while there is no target."""

    def __init__(self, counters: Mapping[str, Counter]) -> None:
        self._counters = counters
        self._target: LatencyTarget | None = None

    def set_target(self, knobs: Mapping[str, Knob]) -> None:
        """The throttle's knobs in force."""
        limits = [knobs["target_ttft_ms"], knobs["target_tpot_ms"]]
        ttft_ms, tpot_ms = (math.inf if limit is None else float(limit) for limit in limits)
        target = LatencyTarget(ttft_ms=ttft_ms, tpot_ms=tpot_ms)
        self._target = None if target == LatencyTarget() else target

    def ended(self, requests: Iterable[RequestRecord]) -> None:
        """Requests have had their last token."""
        if self._target is None:
            return
        for one in requests:
            latency = RequestLatency.of(one.first_token_ms, one.total_ms, one.output_tokens)
            self._counters[str(self._target.is_met(latency)).lower()].inc()
