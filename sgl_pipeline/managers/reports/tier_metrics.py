"""The part of `/metrics` about a store beyond the pool: SGLang's names, and a few of ours.

SGLang's collector defines its names. Those that describe its pool in host memory are not written,
because there is none here; the front counts `cached_tokens_total` by its source.
"""

from typing import Any

from prometheus_client import Counter, Gauge
from sglang.srt.observability.metrics_collector import StorageMetricsCollector

from sgl_pipeline.pipeline.pipeline_state import TierState

_PREFIX = "sgl_pipeline_store_"


class TierMetrics:
    """Made when the first store is attached.

    Args:
        backend: that store's, as of `args.STORAGE_BACKENDS`.
        model: its served name, the label of our metrics.
        extra_labels: of `--extra-metric-labels`.
    """

    def __init__(
        self, backend: str, model: str, num_stages: int, extra_labels: dict[str, str]
    ) -> None:
        self._labels: dict[str, Any] = {
            "storage_backend": backend,
            "tp_rank": 0,
            "dp_rank": 0,
            "pp_rank": 0,
            "pp_size": num_stages,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            **extra_labels,
        }
        self._upstream = StorageMetricsCollector(self._labels)
        self._own: dict[str, Any] = {"model_name": model}
        self._waiting = self._gauge("waiting_tokens", "Tokens of waiting requests.", "source")
        self._pages = self._gauge("pages_under_way", "Pages on their way.", "direction")
        self._loading_s = self._gauge("loading_seconds", "Predicted time of what is to be loaded.")
        self._lookups = self._counter("lookups", "Prefixes that the store was asked for.")
        self._hits = self._counter("hits", "Prefixes of which it had a page.")
        self._bytes = self._counter("bytes", "Keys and values moved.", "direction")
        self._busy_s = self._counter("busy_seconds", "Time of stages on them.", "direction")
        self._dropped = self._counter("dropped_tokens", "Tokens not saved, by reason.", "reason")
        self._broken = self._counter("broken_pages", "Pages missing, short or altered.")
        self._before = TierState(backend=None)

    def publish(self, state: TierState) -> None:
        """Writes `state`; counts grow by what has happened since the last one."""
        before, self._before = self._before, state
        moves = _moves(before, state)
        self._publish_upstream(before, state, moves)
        tokens = {
            "pool": state.cached_tokens,
            "store": state.loading_tokens,
            "compute": state.compute_tokens,
        }
        for source, number in tokens.items():
            self._waiting.labels(**self._own, source=source).set(number)
        self._pages.labels(**self._own, direction="load").set(state.loading_pages)
        self._pages.labels(**self._own, direction="save").set(state.saving_pages)
        self._loading_s.labels(**self._own).set(state.loading_s)
        self._lookups.labels(**self._own).inc(state.lookups - before.lookups)
        self._hits.labels(**self._own).inc(state.hits - before.hits)
        for direction, (num_bytes, busy_s) in moves.items():
            self._bytes.labels(**self._own, direction=direction).inc(num_bytes)
            self._busy_s.labels(**self._own, direction=direction).inc(busy_s)
        for reason, number in _grown(before.dropped_tokens, state.dropped_tokens).items():
            self._dropped.labels(**self._own, reason=reason).inc(number)
        self._broken.labels(**self._own).inc(state.broken_pages - before.broken_pages)

    def _publish_upstream(
        self, before: TierState, state: TierState, moves: dict[str, tuple[int, float]]
    ) -> None:
        """Notes the mean bandwidth of a second in which pages came or went."""
        upstream, labels = self._upstream, self._labels
        labels["storage_backend"] = state.backend or labels["storage_backend"]
        dropped = sum(_grown(before.dropped_tokens, state.dropped_tokens).values())
        for counter, number in (
            (upstream.prefetched_tokens_total, state.loaded_tokens - before.loaded_tokens),
            (upstream.backuped_tokens_total, state.saved_tokens - before.saved_tokens),
            (upstream.storage_prefetch_hit_tokens_total, state.found_tokens - before.found_tokens),
            (upstream.backup_dropped_tokens_total, dropped),
        ):
            counter.labels(**labels).inc(number)
        missed = upstream.storage_prefetch_unfulfilled_tokens_total
        for reason, number in _grown(before.missed_tokens, state.missed_tokens).items():
            missed.labels(**labels, reason=reason).inc(number)
        bandwidths = {
            "load": upstream.histogram_prefetch_bandwidth,
            "save": upstream.histogram_backup_bandwidth,
        }
        for direction, (num_bytes, busy_s) in moves.items():
            if num_bytes and busy_s > 0.0:
                bandwidths[direction].labels(**labels).observe(num_bytes / busy_s / 1e9)

    def _gauge(self, name: str, text: str, *more: str) -> Gauge:
        labels = [*self._own, *more]
        return Gauge(_PREFIX + name, text, labelnames=labels, multiprocess_mode="mostrecent")

    def _counter(self, name: str, text: str, *more: str) -> Counter:
        return Counter(_PREFIX + name, text, labelnames=[*self._own, *more])


def _moves(before: TierState, now: TierState) -> dict[str, tuple[int, float]]:
    """Bytes and busy seconds of each direction in between."""
    return {
        "load": (now.loaded_bytes - before.loaded_bytes, now.load_s - before.load_s),
        "save": (now.saved_bytes - before.saved_bytes, now.save_s - before.save_s),
    }


def _grown(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {reason: number - before.get(reason, 0) for reason, number in now.items()}
