"""The scheduler's part of `/metrics` (`--enable-metrics`): SGLang's names, and a few of ours.

Upstream's collector defines its names and labels; ours begin with `sgl_pipeline_`. The front's own
process exports the latencies and token counts of requests. Counts are written about once a second,
from a state that exists anyway: Prometheus asks less often, and no step waits for it.
"""

from collections.abc import Callable, Iterable, Sequence
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
from sgl_pipeline.managers.reports.rooms_metrics import RoomsMetrics, queue_stats
from sgl_pipeline.managers.reports.tier_metrics import TierMetrics
from sgl_pipeline.pipeline.pipeline_state import PipelineState, TierState
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
_KNOBS = ("prefill_spread_steps", "max_prefill_tokens", "min_prefill_tokens", "pause_free_share")
_MOVE_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class MetricsReport:
    """The metrics of one scheduler process, whose ServerArgs are published; `engine_type` is
    SGLang's word for its role.

    Upstream's environment must name the directory of Prometheus's multi-process mode before this
    module is imported (upstream does so in the main process).
    """

    def __init__(
        self,
        server_args: Any,
        engine_type: str,
        num_stages: int,
        page_size: int,
        num_pages: int,
        context_length: int,
    ) -> None:
        self._upstream = SchedulerMetricsCollector(_labels(server_args, engine_type), server_args)
        self._page_size, self._num_pages = page_size, num_pages
        self._own = _PipelineMetrics(
            {"model_name": self._upstream.labels["model_name"]}, num_stages
        )
        self._counted: dict[Any, float] = {}
        self._tiers: TierMetrics | None = None
        self._rooms: RoomsMetrics | None = None
        self._num_stages = num_stages
        self._extra_labels: dict[str, str] = server_args.extra_metric_labels or {}
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
        own.move_bytes["copied"].inc(record.copied_bytes)
        own.move_bytes["patched"].inc(record.patched_bytes)
        if record.outcome is MoveOutcome.DONE:
            own.move_gap_s.set(record.gap_ms / 1e3)

    def _count_change(self, change: ThrottleChange) -> None:
        self._own.throttle_changes[change.cause].inc()

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
            own.stage_changes[direction].inc()

    def publish(self, load: LoadSnapshot, state: PipelineState) -> None:
        """Writes `state`, if it is time; `load` is the same as upstream counts it."""
        if state.now_s < self._next_report_s:
            return
        self._next_report_s = state.now_s + _INTERVAL_S
        self._publish_upstream(load, state)
        self._publish_own(state)
        if state.tier is not None:
            self._publish_tier(state.tier)
        if state.rooms is not None:
            if self._rooms is None:
                self._rooms = RoomsMetrics(self._upstream, self._own.labels["model_name"])
            self._rooms.publish(state.rooms)

    def _publish_upstream(self, load: LoadSnapshot, state: PipelineState) -> None:
        """Publishes upstream's metrics that mean something here; the others keep "nothing"."""
        cached_pages = state.load.free_pages - state.unused_pages
        rooms = {}
        if state.rooms is not None:
            rooms = queue_stats(state.rooms, self._num_pages)
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
                **rooms,
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
        self._count(own.step_tokens["prefill"], state.prefill_tokens)
        self._count(own.step_tokens["decode"], state.decodes)
        if state.recent_steps:
            self._publish_recent(state)
        for number, stage in enumerate(state.stages):
            own.stage_slowdown[number].set(stage.slowdown)
            own.stage_is_slow[number].set(stage.slow_since_s is not None)
            self._count(own.stage_input_wait_s[number], stage.input_wait_ms / 1e3)
            self._count(own.stage_compute_s[number], stage.compute_ms / 1e3)

    def _publish_tier(self, tier: TierState) -> None:
        if self._tiers is None and tier.backend is not None:
            model = self._own.labels["model_name"]
            self._tiers = TierMetrics(tier.backend, model, self._num_stages, self._extra_labels)
        if self._tiers is not None:
            self._tiers.publish(tier)

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
        """Publishes the tokens of the newest steps, and the shares of their stages' time."""
        own, newest = self._own, state.recent_steps[-1]
        own.microbatch_tokens["prefill"].set(newest.prefill_tokens)
        own.microbatch_tokens["decode"].set(newest.decodes)
        own.budgets["prefill"].set(newest.prefill_budget)
        own.budgets["decode"].set(newest.decode_budget)
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


def _labels(server_args: Any, engine_type: str) -> dict[str, Any]:
    """The labels of upstream's scheduler (`SchedulerMetricsCollector.init_new`) at one process."""
    labels = {
        "model_name": server_args.served_model_name,
        "engine_type": engine_type,
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
        self._stages = [str(stage) for stage in range(num_stages)]
        self._add_moves()
        self._add_throttle()
        self._add_recoveries()
        self._add_stage_times()
        self.waiting_tokens = self._gauge(
            "waiting_tokens", "Prompt tokens not yet scheduled, cache hits excluded."
        )
        self.free_page_share = self._gauge(
            "free_page_share", "Share of the KV pages that is free or evictable."
        )
        self.naive_waiting_tokens = self._gauge(
            "naive_waiting_tokens", "Prompt tokens not yet scheduled, cached or not."
        )
        self.naive_free_page_share = self._gauge(
            "naive_free_page_share", "Share of the KV pages that is free; cached are not."
        )
        kinds = ("prefill", "decode")
        self.microbatch_tokens = self._gauges(
            "microbatch_tokens", "Tokens of the newest step.", "kind", kinds
        )
        self.budgets = self._gauges(
            "microbatch_budget_tokens", "Most that the policy gave the newest step.", "kind", kinds
        )
        self.steps_in_flight = self._gauge("steps_in_flight", "Steps between first and last stage.")
        self.num_stages = self._gauge("num_stages", "Pipeline stages that serve.")
        self.num_stages.set(num_stages)
        configured = "Pipeline stages that the server was started with."
        self._gauge("configured_stages", configured).set(num_stages)
        self.steps = self._counter("steps", "Steps scheduled.").labels(**labels)
        self.step_tokens = self._counters(
            "step_tokens", "Tokens of the steps scheduled.", "kind", kinds
        )

    def _add_throttle(self) -> None:
        """Adds metrics of the policy and its knobs."""
        self.bound_by = self._gauges(
            "budget_bound_by",
            "1 for the rule that bound the newest prefill budget.",
            "rule",
            get_args(Bound),
        )
        self.missed_targets = self._gauges(
            "target_missed",
            "1 for the target that cannot be met as things stand.",
            "target",
            get_args(Target),
        )
        self.throttle_knobs = self._gauges(
            "throttle_knob", "A knob of the policy in force.", "knob", _KNOBS
        )
        self.policies = self._gauges("policy", "1 for the policy in force.", "policy", POLICIES)
        self.throttle_changes = self._counters(
            "throttle_changes", "Changes of the policy's knobs.", "cause", get_args(Cause)
        )

    def _add_moves(self) -> None:
        """Adds metrics of the layer split and its changes."""
        self.stage_layers = self._gauges_of_stages("stage_layers", "Layers of the plan in use.")
        self.plan_epoch = self._gauge("plan_epoch", "Number of the plan in use.")
        self.moves = self._counter("layer_moves", "Layer moves.", "outcome", "wanted_by")
        self.move_bytes = self._counters(
            "layer_move_bytes",
            "Keys and values sent by moves.",
            "phase",
            ("copied", "patched"),
        )
        self.move_gap_s = self._gauge(
            "layer_move_gap_seconds", "At most how long the last move held up a step."
        )
        self.move_seconds = self._histogram(
            "layer_move_seconds", "From the wish for a move to its end.", _MOVE_SECONDS, "outcome"
        )

    def _add_stage_times(self) -> None:
        bubbles = _gauge(
            "stage_bubble_share",
            f"Share of a stage's time lost to this cause over the newest {RECENT_STEPS} steps.",
            [*self.labels, "stage", "cause"],
        )
        self.bubble_shares = [
            {
                cause: bubbles.labels(**self.labels, stage=stage, cause=cause)
                for cause in BUBBLE_CAUSES
            }
            for stage in self._stages
        ]
        self.stage_slowdown = self._gauges_of_stages(
            "stage_slowdown", "A stage's times over what is predicted for them."
        )
        self.stage_is_slow = self._gauges_of_stages(
            "stage_is_slow", "1 for a stage that is slower than it should be."
        )
        waits = "Time a stage has waited for work."
        works = "Time a stage has worked."
        self.stage_input_wait_s = [
            *self._counters("stage_input_wait_seconds", waits, "stage", self._stages).values()
        ]
        self.stage_compute_s = [
            *self._counters("stage_compute_seconds", works, "stage", self._stages).values()
        ]

    def _add_recoveries(self) -> None:
        self.is_recovering = self._gauge(
            "is_recovering", "1 while a stage is replaced, or others take over its layers."
        )
        self.lost_workers = self._counter("lost_workers", "Workers that were replaced.", "stage")
        self.recomputed_tokens = self._counter(
            "recovery_tokens", "Tokens to prefill again because a stage was lost."
        ).labels(**self.labels)
        self.stage_changes = self._counters(
            "stage_changes",
            "Times that fewer stages went on, or more again.",
            "direction",
            ("fewer", "more"),
        )
        self.replayed_tokens = self._counter(
            "replayed_tokens",
            "Tokens that a stage which was replaced has computed again by itself.",
            "stage",
        )
        self.recovery_seconds = self._histogram(
            "recovery_seconds",
            "From the loss of a stage to the first step that all stages can run.",
            _RECOVERY_SECONDS,
        )
        self.handover_seconds = self._histogram(
            "handover_seconds",
            "How long no step began while a worker that leaves handed its stage over.",
            _HANDOVER_SECONDS,
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return _gauge(name, text, [*self.labels]).labels(**self.labels)

    def _gauges(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Gauge]:
        """A gauge for each value of `label`."""
        gauge = _gauge(name, text, [*self.labels, label])
        return {value: gauge.labels(**self.labels, **{label: value}) for value in values}

    def _gauges_of_stages(self, name: str, text: str) -> list[Gauge]:
        return [*self._gauges(name, text, "stage", self._stages).values()]

    def _counter(self, name: str, text: str, *more: str) -> Counter:
        return Counter(f"sgl_pipeline_{name}", text, labelnames=[*self.labels, *more])

    def _counters(
        self, name: str, text: str, label: str, values: Iterable[str]
    ) -> dict[str, Counter]:
        """A counter for each value of `label`."""
        counter = self._counter(name, text, label)
        return {value: counter.labels(**self.labels, **{label: value}) for value in values}

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *more: str) -> Histogram:
        labels = [*self.labels, *more]
        return Histogram(f"sgl_pipeline_{name}", text, labelnames=labels, buckets=buckets)


def _gauge(name: str, text: str, labels: Sequence[str]) -> Gauge:
    return Gauge(f"sgl_pipeline_{name}", text, labelnames=labels, multiprocess_mode="mostrecent")
