"""The part of `/metrics` about rooms: SGLang's names, and a few of ours.

SGLang's collector defines its names. Those of its deferred releases and its receipts in host memory
are not written: there is nothing like these here.
"""

from typing import Any

from prometheus_client import Counter, Gauge
from sglang.srt.observability.metrics_collector import QueueCount, SchedulerMetricsCollector

from sgl_pipeline.pipeline.pipeline_state import RoomsState

_PREFIX = "sgl_pipeline_rooms_"
_MIB, _GIB = 2**20, 2**30


def queue_stats(rooms: RoomsState, num_pages: int) -> dict[str, Any]:
    """The fields of upstream's `SchedulerStats` about rooms.

    Args:
        num_pages: of the pool.
    """
    bootstrap, transfer = QueueCount(rooms.bootstrap_requests), QueueCount(rooms.transfer_requests)
    if rooms.mode == "prefill":
        return {
            "num_prefill_bootstrap_queue_reqs": bootstrap,
            "num_prefill_inflight_queue_reqs": transfer,
        }
    return {
        "num_decode_prealloc_queue_reqs": bootstrap,
        "num_decode_transfer_queue_reqs": transfer,
        "prealloc_full_token_usage": rooms.promised_pages / num_pages,
        "pending_prealloc_token_usage": rooms.pending_pages / num_pages,
    }


class RoomsMetrics:
    """Counts that grow, and values for which SGLang has no name.

    Args:
        model: its served name, the label of our metrics.
    """

    def __init__(self, upstream: SchedulerMetricsCollector, model: str) -> None:
        self._upstream = upstream
        self._own = {"model_name": model}
        self._peers = self._gauge("peers", "Prefill or decode servers to which there is a stream.")
        self._pages = self._gauge("pages", "Pages kept for rooms.", "state")
        self._computed_here = Counter(
            f"{_PREFIX}computed_here", "Rooms whose prompts a decode server computed.", [*self._own]
        )
        self._before: RoomsState | None = None

    def publish(self, rooms: RoomsState) -> None:
        """Writes `rooms`; counts grow by what has happened since the last one."""
        before = self._before or RoomsState(
            mode=rooms.mode, num_peers=0, bootstrap_requests=0, transfer_requests=0
        )
        self._before = rooms
        upstream, labels = self._upstream, self._upstream.labels
        self._peers.labels(**self._own).set(rooms.num_peers)
        self._pages.labels(**self._own, state="held").set(rooms.held_pages)
        self._pages.labels(**self._own, state="promised").set(rooms.promised_pages)
        self._computed_here.labels(**self._own).inc(rooms.computed_here - before.computed_here)
        upstream.num_bootstrap_failed_reqs.labels(**labels).inc(
            rooms.bootstrap_failed - before.bootstrap_failed
        )
        upstream.num_transfer_failed_reqs.labels(**labels).inc(
            rooms.transfer_failed - before.transfer_failed
        )
        self._observe_transfers(before, rooms)

    def _observe_transfers(self, before: RoomsState, now: RoomsState) -> None:
        """Each room whose prompt a decode server has read since counts with the mean of these
        rooms."""
        number = now.transferred - before.transferred
        if now.mode == "prefill" or not number:
            return
        num_bytes = (now.loaded_bytes - before.loaded_bytes) / number
        transfer_s = (now.transfer_s - before.transfer_s) / number
        bootstrap_s = (now.bootstrap_s - before.bootstrap_s) / number
        alloc_s = (now.alloc_s - before.alloc_s) / number
        for _ in range(number):
            self._upstream.observe_kv_transfer_metrics(
                latency_ms=1e3 * transfer_s,
                total_mb=num_bytes / _MIB,
                speed_gb_s=num_bytes / _GIB / transfer_s if transfer_s > 0.0 else 0.0,
            )
            self._upstream.observe_kv_transfer_bootstrap(
                bootstrap_ms=1e3 * bootstrap_s, alloc_ms=1e3 * alloc_s
            )

    def _gauge(self, name: str, text: str, *more: str) -> Gauge:
        labels = [*self._own, *more]
        return Gauge(_PREFIX + name, text, labelnames=labels, multiprocess_mode="mostrecent")
