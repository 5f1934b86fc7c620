"""The part of `/metrics` about rooms: SGLang's names, and two of ours.

SGLang's collector defines its names. Those of its pools of slots, its deferred releases and its
receipts in host memory are not written: there is nothing like these here.
"""

from typing import Any

from prometheus_client import Counter, Gauge
from sglang.srt.observability.metrics_collector import QueueCount, SchedulerMetricsCollector

from sgl_pipeline.pipeline.pipeline_state import RoomsState

_PREFIX = "sgl_pipeline_rooms_"
_MIB, _GIB = 2**20, 2**30


def queue_stats(rooms: RoomsState, page_size: int, num_pages: int) -> dict[str, Any]:
    """The fields of upstream's `SchedulerStats` about rooms.

    Args:
        num_pages: of the pool.
    """
    return {
        "num_prefill_bootstrap_queue_reqs": QueueCount(rooms.unclaimed_rooms),
        "num_prefill_inflight_queue_reqs": QueueCount(rooms.offered_rooms),
        "num_decode_prealloc_queue_reqs": QueueCount(rooms.awaited_rooms),
        "num_decode_transfer_queue_reqs": QueueCount(rooms.loading_rooms),
        "pending_prealloc_token_usage": rooms.awaited_tokens / (num_pages * page_size),
        "prealloc_full_token_usage": rooms.promised_pages / num_pages,
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
        self._failed = Counter(
            f"{_PREFIX}failed", "Rooms that ended badly, by reason.", ["model_name", "reason"]
        )
        self._before = RoomsState()

    def publish(self, rooms: RoomsState) -> None:
        """Writes `rooms`; counts grow by what has happened since the last one."""
        before, self._before = self._before, rooms
        self._peers.labels(**self._own).set(rooms.peers)
        self._pages.labels(**self._own, state="held").set(rooms.held_pages)
        self._pages.labels(**self._own, state="promised").set(rooms.promised_pages)
        labels = self._upstream.labels
        for counter, then, now in (
            (self._upstream.num_bootstrap_failed_reqs, before.failed_before, rooms.failed_before),
            (self._upstream.num_transfer_failed_reqs, before.failed_moves, rooms.failed_moves),
        ):
            for reason, number in now.items():
                grown = number - then.get(reason, 0)
                counter.labels(**labels).inc(grown)
                self._failed.labels(**self._own, reason=reason).inc(grown)
        self._observe_moves(before, rooms)

    def _observe_moves(self, before: RoomsState, now: RoomsState) -> None:
        """Each room whose pages have crossed since counts with the mean of these rooms."""
        number = now.moved - before.moved
        if not number:
            return
        num_bytes = (now.moved_bytes - before.moved_bytes) / number
        move_s = (now.move_s - before.move_s) / number
        rendezvous_s = (now.rendezvous_s - before.rendezvous_s) / number
        promise_s = (now.promise_s - before.promise_s) / number
        for _ in range(number):
            self._upstream.observe_kv_transfer_metrics(
                latency_ms=1e3 * move_s,
                total_mb=num_bytes / _MIB,
                speed_gb_s=num_bytes / _GIB / move_s if move_s > 0.0 else 0.0,
            )
            self._upstream.observe_kv_transfer_bootstrap(
                bootstrap_ms=1e3 * rendezvous_s, alloc_ms=1e3 * promise_s
            )

    def _gauge(self, name: str, text: str, *more: str) -> Gauge:
        labels = [*self._own, *more]
        return Gauge(_PREFIX + name, text, labelnames=labels, multiprocess_mode="mostrecent")
