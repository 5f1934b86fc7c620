"""Rooms under SGLang's names: counts grow by what has happened since the last state."""

from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client import REGISTRY
from sglang.srt.observability.metrics_collector import SchedulerStats

from sgl_pipeline.managers.reports.rooms_metrics import RoomsMetrics, queue_stats
from sgl_pipeline.pipeline.pipeline_state import RoomsState

ROOMS = RoomsState(
    mode="decode",
    num_peers=2,
    bootstrap_requests=3,
    transfer_requests=4,
    promised_pages=25,
    transferred=4,
    pending_pages=10,
    transfer_s=2.0,
    bootstrap_s=6.0,
    alloc_s=1.0,
    bootstrap_failed=2,
    transfer_failed=1,
    computed_here=1,
    loaded_bytes=4 * 2**30,
)


class _Collector:
    """The part of upstream's collector that is written to."""

    def __init__(self) -> None:
        self.labels = {"engine_type": "decode"}
        self.transfers: list[dict[str, float]] = []
        self.waits: list[dict[str, float]] = []
        self.failed: list[tuple[str, float]] = []
        self.num_bootstrap_failed_reqs = self._counter("bootstrap")
        self.num_transfer_failed_reqs = self._counter("transfer")

    def observe_kv_transfer_metrics(self, **values: float) -> None:
        self.transfers.append(values)

    def observe_kv_transfer_bootstrap(self, **values: float) -> None:
        self.waits.append(values)

    def _counter(self, name: str) -> Any:
        def labels(**labels: str) -> Any:
            assert labels == self.labels
            return SimpleNamespace(inc=lambda number: self.failed.append((name, number)))

        return SimpleNamespace(labels=labels)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "m"} | labels)


def test_queues_and_shares_are_fields_of_upstreams_stats() -> None:
    stats = SchedulerStats(**queue_stats(ROOMS, num_pages=100))
    assert stats.num_decode_prealloc_queue_reqs.total == 3
    assert stats.num_decode_transfer_queue_reqs.total == 4
    assert stats.prealloc_full_token_usage == 0.25
    assert stats.pending_prealloc_token_usage == 0.1
    assert stats.num_prefill_bootstrap_queue_reqs.total == 0
    prefill = SchedulerStats(
        **queue_stats(msgspec.structs.replace(ROOMS, mode="prefill"), num_pages=100)
    )
    assert prefill.num_prefill_bootstrap_queue_reqs.total == 3
    assert prefill.num_prefill_inflight_queue_reqs.total == 4
    assert prefill.num_decode_transfer_queue_reqs.total == 0


def test_each_room_is_counted_once() -> None:
    """One test: names can be registered once in a process."""
    collector: Any = _Collector()
    metrics = RoomsMetrics(collector, "m")
    metrics.publish(ROOMS)
    assert value("sgl_pipeline_rooms_peers") == 2
    assert value("sgl_pipeline_rooms_pages", state="held") == 0
    assert value("sgl_pipeline_rooms_pages", state="promised") == 25
    assert value("sgl_pipeline_rooms_computed_here_total") == 1
    assert collector.failed == [("bootstrap", 2), ("transfer", 1)]
    transfer = {"latency_ms": 500.0, "total_mb": 1024.0, "speed_gb_s": 2.0}
    assert collector.transfers == [transfer] * 4
    assert collector.waits == [{"bootstrap_ms": 1500.0, "alloc_ms": 250.0}] * 4

    metrics.publish(ROOMS)
    assert len(collector.transfers) == 4, "nothing is counted twice"
    assert sum(number for _, number in collector.failed) == 3
    metrics.publish(msgspec.structs.replace(ROOMS, transferred=5, computed_here=3))
    assert value("sgl_pipeline_rooms_computed_here_total") == 3
    assert collector.transfers[-1]["speed_gb_s"] == 0.0, "no time was measured"
    later = msgspec.structs.replace(ROOMS, computed_here=3, transferred=9)
    metrics.publish(msgspec.structs.replace(later, mode="prefill", held_pages=7))
    assert value("sgl_pipeline_rooms_pages", state="held") == 7
    assert len(collector.transfers) == 5, "the decode server has counted them"
