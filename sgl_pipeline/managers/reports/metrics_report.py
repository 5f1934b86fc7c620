"""The scheduler's part of `/metrics` (`--enable-metrics`): SGLang's names, and a few of ours.

Upstream's collector defines its names and labels; ours begin with `sgl_pipeline_`. The front's own
process exports the latencies and token counts of requests. Counts are written about once a second,
from a state that exists anyway: Prometheus asks less often, and no step waits for it.
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any, get_args

from prometheus_client import Counter, Gauge, Histogram
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.observability.metrics_collector import (
    QueueCount,
    SchedulerMetricsCollector,
    SchedulerStats,
)

from sgl_pipeline.args import POLICIES
from sgl_pipeline.pipeline.pipeline_state import PipelineState
from sgl_pipeline.pipeline.step_history import RECENT_STEPS
from sgl_pipeline.pipeline.throttle_control import ThrottleState
from sgl_pipeline.records.event import Event
from sgl_pipeline.records.move_record import MoveOutcome, MoveRecord
from sgl_pipeline.records.recovery_record import RecoveryRecord
from sgl_pipeline.records.stage_timing import BUBBLE_CAUSES
from sgl_pipeline.records.throttle_change import Cause, ThrottleChange
from sgl_pipeline.records.trace import RequestRecord
from sgl_pipeline.throttle import Bound, Target

_INTERVAL_S = 1.0
_RECOVERY_SECONDS = (0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0, 120.0)
_HANDOVER_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_MOVE_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


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
        self._counted_events: dict[type, Callable[[Any], None]] = {
            MoveRecord: self._count_move,
            ThrottleChange: self._count_change,
            RecoveryRecord: self._count_recovery,
        }
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

    def on(self, event: Event) -> None:
        """Counts `event`, if it is over and its kind is counted."""
        count = self._counted_events.get(type(event))
        if count is not None and event.is_over:
            count(event)

    def _count_move(self, record: MoveRecord) -> None:
        assert record.ended_s is not None
        own, outcome = self._own, record.outcome.value
        own.moves.labels(**own.labels, outcome=outcome, wanted_by=record.wanted_by).inc()
        own.move_seconds.labels(**own.labels, outcome=outcome).observe(
            record.ended_s - record.began_s
        )
        own.copied_bytes.inc(record.copied_bytes)
        own.patched_bytes.inc(record.patched_bytes)
        if record.outcome is MoveOutcome.DONE:
            own.move_gap_s.set(record.gap_ms / 1e3)

    def _count_change(self, change: ThrottleChange) -> None:
        self._own.throttle_changes.labels(**self._own.labels, cause=change.cause).inc()

    def _count_recovery(self, record: RecoveryRecord) -> None:
        assert record.ended_s is not None
        own = self._own
        for lost in record.lost:
            if not lost.has_left:
                stage = "none" if lost.stage is None else str(lost.stage)
                own.lost_workers.labels(**own.labels, stage=stage).inc()
        seconds = own.handover_seconds if record.is_planned else own.recovery_seconds
        seconds.labels(**own.labels).observe(record.ended_s - record.began_s)
        own.recomputed_tokens.inc(record.num_tokens)
        if record.has_other_stages:
            direction = "fewer" if record.num_stages < record.stages_before else "more"
            own.stage_changes.labels(**own.labels, direction=direction).inc()

    def publish(self, load: LoadSnapshot, state: PipelineState) -> None:
        """Writes `state`, if it is time; `load` is the same as upstream counts it."""
        if state.now_s < self._next_report_s:
            return
        self._next_report_s = state.now_s + _INTERVAL_S
        self._publish_upstream(load, state)
        self._publish_own(state)

    def _publish_upstream(self, load: LoadSnapshot, state: PipelineState) -> None:
        """Those of upstream's that mean something here; the others keep upstream's "nothing"."""
        cached_pages = state.load.free_pages - state.unused_pages
        retracted = self._upstream.num_retracted_reqs_total.labels(**self._upstream.labels)
        self._upstream.log_stats(
            SchedulerStats(
                num_running_reqs=QueueCount(state.running_requests),
                num_queue_reqs=QueueCount(state.waiting_requests),
                num_grammar_queue_reqs=state.compiling_requests,
                gen_throughput=load.gen_throughput,
                cache_hit_rate=load.cache_hit_rate,
                decode_sum_seq_lens=state.decoding_tokens,
                token_usage=load.token_usage,
                full_token_usage=load.token_usage,
                num_used_tokens=load.num_used_tokens,
                kv_available_tokens=state.unused_pages * self._page_size,
                kv_evictable_tokens=cached_pages * self._page_size,
                kv_used_tokens=load.num_used_tokens,
                num_retracted_reqs=int(state.num_retractions - self._counted.get(retracted, 0)),
            )
        )
        self._count(retracted, state.num_retractions)
        tokens = {
            "prefill_compute": state.prefill_tokens,
            "prefill_cache": state.cached_tokens,
            "decode": state.decodes,
        }
        for mode, number in tokens.items():
            counter = self._upstream.realtime_tokens_total
            self._count(counter.labels(**self._upstream.labels, mode=mode), number)

    def _publish_own(self, state: PipelineState) -> None:
        own = self._own
        own.waiting_tokens.set(state.load.waiting_tokens)
        own.free_page_share.set(state.load.free_share)
        own.naive_waiting_tokens.set(state.naive_load.waiting_tokens)
        own.naive_free_page_share.set(state.naive_load.free_share)
        own.steps_in_flight.set(state.load.steps_in_flight)
        own.plan_epoch.set(state.plan.epoch)
        own.is_recovering.set(state.current_recovery is not None)
        own.num_stages.set(state.plan.num_stages)
        for gauge, count in zip_longest(own.stage_layers, state.plan.layer_counts):
            gauge.set(count or 0)
        for place, number in enumerate(state.replayed_tokens):
            replayed = own.replayed_tokens.labels(**own.labels, stage=str(place))
            self._count(replayed, number)
        if state.throttle is not None:
            self._publish_throttle(state.throttle)
        self._count(own.steps, state.num_steps)
        self._count(own.prefill_tokens, state.prefill_tokens)
        self._count(own.decodes, state.decodes)
        if state.recent_steps:
            self._publish_recent(state)
        for number, stage in enumerate(state.stages):
            own.stage_slowdown[number].set(stage.slowdown)
            own.stage_is_slow[number].set(stage.slow_since_s is not None)
            self._count(own.stage_input_wait_s[number], stage.input_wait_ms / 1e3)
            self._count(own.stage_compute_s[number], stage.compute_ms / 1e3)

    def _publish_throttle(self, throttle: ThrottleState) -> None:
        """The knobs in force; the limit of prefill tokens also where the policy names it."""
        own, knobs = self._own, throttle.knobs | {"max_prefill_tokens": throttle.prefill_limit}
        for name, gauge in own.throttle_knobs.items():
            value = knobs[name]
            assert isinstance(value, int | float)
            gauge.set(value)
        for policy, gauge in own.policies.items():
            gauge.set(policy == knobs["policy"])

    def _publish_recent(self, state: PipelineState) -> None:
        """What the newest steps carried, and how their stages spent their time."""
        own, newest = self._own, state.recent_steps[-1]
        own.microbatch_prefill_tokens.set(newest.prefill_tokens)
        own.microbatch_decodes.set(newest.decodes)
        own.prefill_budget.set(newest.prefill_budget)
        own.decode_budget.set(newest.decode_budget)
        for rule, gauge in own.bound_by.items():
            gauge.set(rule == newest.bound_by)
        for target, gauge in own.missed_targets.items():
            gauge.set(target == newest.missed_target)
        for gauges, shares in zip_longest(own.bubble_shares, state.bubble_shares()):
            for cause, gauge in gauges.items():
                gauge.set(getattr(shares, cause) if shares is not None else 0.0)

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
        self.labels = labels
        self._add_moves(num_stages)
        self._add_throttle()
        self._add_recoveries()
        self._add_slow_stages(num_stages)
        self.waiting_tokens = _gauge(
            "waiting_tokens", "Prompt tokens not yet scheduled, cache hits excluded.", labels
        )
        self.free_page_share = _gauge(
            "free_page_share", "Share of the KV pages that is free or evictable.", labels
        )
        self.naive_waiting_tokens = _gauge(
            "naive_waiting_tokens", "Prompt tokens not yet scheduled, cached or not.", labels
        )
        self.naive_free_page_share = _gauge(
            "naive_free_page_share", "Share of the KV pages that is free; cached are not.", labels
        )
        carried = _labeled_gauge("microbatch_tokens", "Tokens of the newest step.", labels, "kind")
        self.microbatch_prefill_tokens = carried.labels(**labels, kind="prefill")
        self.microbatch_decodes = carried.labels(**labels, kind="decode")
        budget = _labeled_gauge(
            "microbatch_budget_tokens", "Most that the policy gave the newest step.", labels, "kind"
        )
        self.prefill_budget = budget.labels(**labels, kind="prefill")
        self.decode_budget = budget.labels(**labels, kind="decode")
        bound = _labeled_gauge(
            "budget_bound_by",
            "1 for the rule that bound the newest prefill budget.",
            labels,
            "rule",
        )
        self.bound_by = {rule: bound.labels(**labels, rule=rule) for rule in get_args(Bound)}
        missed = _labeled_gauge(
            "target_missed",
            "1 for the target that cannot be met as things stand.",
            labels,
            "target",
        )
        self.missed_targets = {
            target: missed.labels(**labels, target=target) for target in get_args(Target)
        }
        bubbles = _labeled_gauge(
            "stage_bubble_share",
            f"Share of a stage's time lost to this cause over the newest {RECENT_STEPS} steps.",
            labels,
            "stage",
            "cause",
        )
        self.bubble_shares = [
            {
                cause: bubbles.labels(**labels, stage=str(stage), cause=cause)
                for cause in BUBBLE_CAUSES
            }
            for stage in range(num_stages)
        ]
        self.steps_in_flight = _gauge(
            "steps_in_flight", "Steps between first and last stage.", labels
        )
        self.num_stages = _gauge("num_stages", "Pipeline stages that serve.", labels)
        self.num_stages.set(num_stages)
        configured = "Pipeline stages that the server was started with."
        _gauge("configured_stages", configured, labels).set(num_stages)
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

    def _add_throttle(self) -> None:
        """Those of the policy and its knobs."""
        labels = self.labels
        knobs = _labeled_gauge("throttle_knob", "A knob of the policy in force.", labels, "knob")
        self.throttle_knobs = {
            knob: knobs.labels(**labels, knob=knob)
            for knob in (
                "prefill_spread_steps",
                "max_prefill_tokens",
                "min_prefill_tokens",
                "pause_free_share",
            )
        }
        policies = _labeled_gauge("policy", "1 for the policy in force.", labels, "policy")
        self.policies = {one: policies.labels(**labels, policy=one) for one in POLICIES}
        self.throttle_changes = _counter(
            "throttle_changes", "Changes of the policy's knobs.", labels, "cause"
        )
        for cause in get_args(Cause):
            self.throttle_changes.labels(**labels, cause=cause)

    def _add_moves(self, num_stages: int) -> None:
        """Those of the layer split and its changes."""
        labels = self.labels
        layers = _labeled_gauge("stage_layers", "Layers of the plan in use.", labels, "stage")
        self.stage_layers = [
            layers.labels(**labels, stage=str(stage)) for stage in range(num_stages)
        ]
        self.plan_epoch = _gauge("plan_epoch", "Number of the plan in use.", labels)
        self.moves = _counter("layer_moves", "Layer moves.", labels, "outcome", "wanted_by")
        moved = _counter("layer_move_bytes", "Keys and values sent by moves.", labels, "phase")
        self.copied_bytes = moved.labels(**labels, phase="copied")
        self.patched_bytes = moved.labels(**labels, phase="patched")
        self.move_gap_s = _gauge(
            "layer_move_gap_seconds", "At most how long the last move held up a step.", labels
        )
        self.move_seconds = Histogram(
            "sgl_pipeline_layer_move_seconds",
            "From the wish for a move to its end.",
            labelnames=[*labels, "outcome"],
            buckets=_MOVE_SECONDS,
        )

    def _add_slow_stages(self, num_stages: int) -> None:
        labels = self.labels
        slowdown = _labeled_gauge(
            "stage_slowdown", "A stage's times over what is predicted for them.", labels, "stage"
        )
        is_slow = _labeled_gauge(
            "stage_is_slow", "1 for a stage that is slower than it should be.", labels, "stage"
        )
        stages = [str(stage) for stage in range(num_stages)]
        self.stage_slowdown = [slowdown.labels(**labels, stage=stage) for stage in stages]
        self.stage_is_slow = [is_slow.labels(**labels, stage=stage) for stage in stages]

    def _add_recoveries(self) -> None:
        labels = self.labels
        self.is_recovering = _gauge(
            "is_recovering", "1 while a stage is replaced, or others take over its layers.", labels
        )
        self.lost_workers = _counter("lost_workers", "Workers that were replaced.", labels, "stage")
        self.recomputed_tokens = _counter(
            "recovery_tokens", "Tokens to prefill again because a stage was lost.", labels
        ).labels(**labels)
        self.stage_changes = _counter(
            "stage_changes",
            "Times that fewer stages went on, or more again.",
            labels,
            "direction",
        )
        for direction in ("fewer", "more"):
            self.stage_changes.labels(**labels, direction=direction)
        self.replayed_tokens = _counter(
            "replayed_tokens",
            "Tokens that a stage which was replaced has computed again by itself.",
            labels,
            "stage",
        )
        self.recovery_seconds = Histogram(
            "sgl_pipeline_recovery_seconds",
            "From the loss of a stage to the first step that all stages can run.",
            labelnames=[*labels],
            buckets=_RECOVERY_SECONDS,
        )
        self.handover_seconds = Histogram(
            "sgl_pipeline_handover_seconds",
            "How long no step began while a worker that leaves handed its stage over.",
            labelnames=[*labels],
            buckets=_HANDOVER_SECONDS,
        )


def _gauge(name: str, text: str, labels: dict[str, str]) -> Gauge:
    return _labeled_gauge(name, text, labels).labels(**labels)


def _labeled_gauge(name: str, text: str, labels: dict[str, str], *more: str) -> Gauge:
    return Gauge(
        f"sgl_pipeline_{name}",
        text,
        labelnames=[*labels, *more],
        multiprocess_mode="mostrecent",
    )


def _counter(name: str, text: str, labels: dict[str, str], *more: str) -> Counter:
    return Counter(f"sgl_pipeline_{name}", text, labelnames=[*labels, *more])
