"""What `/metrics` tells of the scheduler (`--enable-metrics`): SGLang's names, and a few of ours.

Upstream's collector defines its names and labels; ours begin with `sgl_pipeline_`. The front's own
process exports the latencies and token counts of requests. Written about once a second, from what
is counted anyway: Prometheus asks less often, and no step waits for it.
"""

from typing import Any

from prometheus_client import Counter, Gauge
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.observability.metrics_collector import (
    QueueCount,
    SchedulerMetricsCollector,
    SchedulerStats,
)

from sgl_pipeline.managers.step_journal import StepJournal
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.trace import RequestRecord

_INTERVAL_S = 1.0


class MetricsReport:
    """The metrics of one scheduler process, whose ServerArgs are published.

    Upstream's environment must name the directory of Prometheus's multi-process mode before this
    module is imported (upstream does so in the main process).
    """

    def __init__(
        self,
        server_args: Any,
        num_stages: int,
        page_size: int,
        num_pages: int,
        context_length: int,
    ) -> None:
        self._upstream = SchedulerMetricsCollector(_labels(server_args), server_args)
        self._page_size = page_size
        self._own = _PipelineMetrics(
            {"model_name": self._upstream.labels["model_name"]}, num_stages
        )
        self._counted: dict[Any, float] = {}
        self._next_report_s = 0.0
        gauges = {
            self._upstream.max_total_num_tokens: num_pages * page_size,
            self._upstream.page_size: page_size,
            self._upstream.num_pages: num_pages,
            self._upstream.context_len: context_length,
        }
        for gauge, value in gauges.items():
            gauge.labels(**self._upstream.labels).set(value)

    def ended(self, requests: tuple[RequestRecord, ...]) -> None:
        """Some requests have had their last token."""
        for request in requests:
            self._upstream.observe_queue_time(request.queue_ms / 1e3)

    def publish(
        self, load: LoadSnapshot, steps: StepScheduler, journal: StepJournal, now_s: float
    ) -> None:
        """Writes how things stand, if it is time; `now_s` is a monotonic clock."""
        if now_s < self._next_report_s:
            return
        self._next_report_s = now_s + _INTERVAL_S
        self._publish_upstream(load, steps, journal)
        self._publish_own(steps, journal)

    def _publish_upstream(
        self, load: LoadSnapshot, steps: StepScheduler, journal: StepJournal
    ) -> None:
        """Those of upstream's that mean something here; the others keep upstream's "nothing"."""
        free_pages = steps.num_free_pages
        assert load.queues is not None
        retracted = self._upstream.num_retracted_reqs_total.labels(**self._upstream.labels)
        self._upstream.log_stats(
            SchedulerStats(
                num_running_reqs=QueueCount(load.num_running_reqs),
                num_queue_reqs=QueueCount(load.num_waiting_reqs),
                num_grammar_queue_reqs=load.queues.grammar,
                gen_throughput=load.gen_throughput,
                cache_hit_rate=load.cache_hit_rate,
                decode_sum_seq_lens=steps.num_decoding_tokens,
                token_usage=load.token_usage,
                full_token_usage=load.token_usage,
                num_used_tokens=load.num_used_tokens,
                kv_available_tokens=free_pages * self._page_size,
                kv_evictable_tokens=(steps.load().free_pages - free_pages) * self._page_size,
                kv_used_tokens=load.num_used_tokens,
                num_retracted_reqs=int(steps.num_retractions - self._counted.get(retracted, 0)),
            )
        )
        self._count(retracted, steps.num_retractions)
        tokens = {
            "prefill_compute": journal.prefill_tokens,
            "prefill_cache": steps.num_cached_tokens,
            "decode": journal.decodes,
        }
        for mode, number in tokens.items():
            counter = self._upstream.realtime_tokens_total
            self._count(counter.labels(**self._upstream.labels, mode=mode), number)

    def _publish_own(self, steps: StepScheduler, journal: StepJournal) -> None:
        load = steps.load()
        own = self._own
        own.waiting_tokens.set(load.waiting_tokens)
        own.free_page_share.set(load.free_share)
        own.steps_in_flight.set(load.steps_in_flight)
        self._count(own.steps, load.step_id)
        self._count(own.prefill_tokens, journal.prefill_tokens)
        self._count(own.decodes, journal.decodes)
        for stage, (input_wait_ms, compute_ms) in enumerate(
            zip(journal.input_wait_ms, journal.compute_ms, strict=True)
        ):
            self._count(own.stage_input_wait_s[stage], input_wait_ms / 1e3)
            self._count(own.stage_compute_s[stage], compute_ms / 1e3)

    def _count(self, counter: Any, total: float) -> None:
        """Brings a counter to `total`."""
        counter.inc(total - self._counted.get(counter, 0.0))
        self._counted[counter] = total


def _labels(server_args: Any) -> dict[str, Any]:
    """Those of upstream's scheduler (`SchedulerMetricsCollector.init_new`) at one process."""
    labels = {
        "model_name": server_args.served_model_name,
        "engine_type": "unified",
        "tp_rank": 0,
        "pp_rank": 0,
        "moe_ep_rank": 0,
    }
    if server_args.enable_priority_scheduling:
        labels["priority"] = ""  # of the totals; they are not split by priority
    return labels | (server_args.extra_metric_labels or {})


class _PipelineMetrics:
    """Our own metrics. The tokens of a microbatch are rate(step_tokens) / rate(steps)."""

    def __init__(self, labels: dict[str, str], num_stages: int) -> None:
        self.waiting_tokens = _gauge(
            "waiting_tokens", "Prompt tokens not yet scheduled, cache hits excluded.", labels
        )
        self.free_page_share = _gauge(
            "free_page_share", "Share of the KV pages that is free or evictable.", labels
        )
        self.steps_in_flight = _gauge(
            "steps_in_flight", "Steps between first and last stage.", labels
        )
        _gauge("num_stages", "Pipeline stages.", labels).set(num_stages)
        self.steps = _counter("steps", "Steps scheduled.", labels).labels(**labels)
        tokens = _counter("step_tokens", "Tokens of the steps scheduled.", labels, "kind")
        self.prefill_tokens = tokens.labels(**labels, kind="prefill")
        self.decodes = tokens.labels(**labels, kind="decode")
        waits = _counter(
            "stage_input_wait_seconds", "Time a stage has waited for work.", labels, "stage"
        )
        computes = _counter("stage_compute_seconds", "Time a stage has worked.", labels, "stage")
        stages = range(num_stages)
        self.stage_input_wait_s = [waits.labels(**labels, stage=str(stage)) for stage in stages]
        self.stage_compute_s = [computes.labels(**labels, stage=str(stage)) for stage in stages]


def _gauge(name: str, text: str, labels: dict[str, str]) -> Gauge:
    gauge = Gauge(
        f"sgl_pipeline_{name}", text, labelnames=list(labels), multiprocess_mode="mostrecent"
    )
    return gauge.labels(**labels)


def _counter(name: str, text: str, labels: dict[str, str], *more: str) -> Counter:
    return Counter(f"sgl_pipeline_{name}", text, labelnames=[*labels, *more])
