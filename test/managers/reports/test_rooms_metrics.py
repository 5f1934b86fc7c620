"""Rooms under SGLang's names: counts grow by what has happened since the last state."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY
from sglang.srt.observability.metrics_collector import SchedulerStats

from sgl_pipeline.managers.reports.rooms_metrics import RoomsMetrics, queue_stats
from sgl_pipeline.pipeline.pipeline_state import RoomsState

ROOMS = RoomsState(
    peers=2,
    unclaimed_rooms=3,
    offered_rooms=4,
    held_pages=50,
    awaited_rooms=5,
    awaited_tokens=160,
    loading_rooms=6,
    promised_pages=25,
    moved=4,
    moved_bytes=4 * 2**30,
    rendezvous_s=0.4,
    promise_s=0.2,
    move_s=2.0,
    failed_before={"waiting timeout": 2},
    failed_moves={"lost peer": 1},
)


class _Collector:
    """The part of upstream's collector that is written to."""

    def __init__(self) -> None:
        self.labels = {"engine_type": "decode"}
        self.moves: list[tuple[str, dict[str, float]]] = []
        self.failed: list[tuple[str, float]] = []
        self.num_bootstrap_failed_reqs = self._counter("bootstrap")
        self.num_transfer_failed_reqs = self._counter("transfer")

    def observe_kv_transfer_metrics(self, **values: float) -> None:
        self.moves.append(("transfer", values))

    def observe_kv_transfer_bootstrap(self, **values: float) -> None:
        self.moves.append(("bootstrap", values))

    def _counter(self, name: str) -> Any:
        def labels(**labels: str) -> Any:
            assert labels == self.labels
            return SimpleNamespace(inc=lambda number: self.failed.append((name, number)))

        return SimpleNamespace(labels=labels)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "m"} | labels)


def test_queues_and_shares_are_fields_of_upstreams_stats() -> None:
    stats = SchedulerStats(**queue_stats(ROOMS, page_size=16, num_pages=100))
    assert stats.num_prefill_bootstrap_queue_reqs.total == 3
    assert stats.num_prefill_inflight_queue_reqs.total == 4
    assert stats.num_decode_prealloc_queue_reqs.total == 5
    assert stats.num_decode_transfer_queue_reqs.total == 6
    assert stats.pending_prealloc_token_usage == pytest.approx(0.1)
    assert stats.prealloc_full_token_usage == 0.25


def test_each_room_is_counted_once() -> None:
    """One test: names can be registered once in a process."""
    collector: Any = _Collector()
    metrics = RoomsMetrics(collector, "m")
    metrics.publish(ROOMS)
    assert value("sgl_pipeline_rooms_peers") == 2
    assert value("sgl_pipeline_rooms_pages", state="held") == 50
    assert value("sgl_pipeline_rooms_pages", state="promised") == 25
    assert value("sgl_pipeline_rooms_failed_total", reason="waiting timeout") == 2
    assert collector.failed == [("bootstrap", 2), ("transfer", 1)]
    transfer = {"latency_ms": 500.0, "total_mb": 1024.0, "speed_gb_s": 2.0}
    bootstrap = {"bootstrap_ms": 100.0, "alloc_ms": 50.0}
    assert collector.moves == [("transfer", transfer), ("bootstrap", bootstrap)] * 4

    metrics.publish(ROOMS)
    assert len(collector.moves) == 8, "nothing is counted twice"
    assert value("sgl_pipeline_rooms_failed_total", reason="lost peer") == 1
    later = msgspec.structs.replace(ROOMS, moved=5, failed_moves={"lost peer": 3})
    metrics.publish(later)
    assert value("sgl_pipeline_rooms_failed_total", reason="lost peer") == 3
    assert collector.moves[-2][1]["speed_gb_s"] == 0.0, "no time was measured"
