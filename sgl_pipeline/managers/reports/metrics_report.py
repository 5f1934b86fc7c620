"""The scheduler's part of `/metrics` (`--enable-metrics`): SGLang's names, and a few of ours.

Upstream's collector defines its names and labels; ours begin with `sgl_pipeline_`. The front's own
process exports the latencies and token counts of requests. Counts are written about once a second,
from a state that exists anyway: Prometheus asks less often, and no step waits for it.
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.observability.metrics_collector import (
    QueueCount,
    SchedulerMetricsCollector,
    SchedulerStats,
)

from sgl_pipeline.managers.reports.goodput_metrics import GoodputMetrics
from sgl_pipeline.managers.reports.pipeline_metrics import PipelineMetrics
from sgl_pipeline.managers.reports.rooms_metrics import RoomsMetrics, queue_stats
from sgl_pipeline.managers.reports.tenant_metrics import TenantMetrics
from sgl_pipeline.managers.reports.tier_metrics import TierMetrics
from sgl_pipeline.pipeline.pipeline_state import PipelineState, TierState
from sgl_pipeline.pipeline.throttle_control import ThrottleState
from sgl_pipeline.records.event import Event
from sgl_pipeline.records.move_record import MoveOutcome, MoveRecord
from sgl_pipeline.records.recovery_record import RecoveryRecord
from sgl_pipeline.records.throttle_change import ThrottleChange
from sgl_pipeline.records.trace import RequestRecord

_INTERVAL_S = 1.0


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
        self._own = PipelineMetrics({"model_name": self._upstream.labels["model_name"]}, num_stages)
        self._goodput = GoodputMetrics(self._own.goodput_requests)
        self._counted: dict[Any, float] = {}
        self._tiers: TierMetrics | None = None
        self._rooms: RoomsMetrics | None = None
        self._tenants: TenantMetrics | None = None
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
        self._goodput.ended(requests)

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
        if state.tenants:
            if self._tenants is None:
                self._tenants = TenantMetrics(self._own.labels["model_name"])
            self._tenants.publish(state.tenants)

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
                spec_accept_length=state.drafts.accept_length,
                spec_accept_rate=state.drafts.accept_rate,
                spec_num_steps=state.drafts.most_each,
                spec_num_draft_tokens=state.drafts.most_each and 1 + state.drafts.most_each,
                decode_sum_seq_lens=state.decoding_tokens,
                token_usage=load.token_usage,
                full_token_usage=1.0 - state.load.free_share,
                mamba_usage=state.state_usage,
                mamba_available_tokens=state.free_state_slots,
                mamba_evictable_tokens=state.evictable_state_slots,
                mamba_used_tokens=state.used_state_slots,
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
            "decode": state.decoded_tokens,
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
        self._count(own.step_tokens["draft"], state.drafts.drafted_tokens)
        self._count(own.accepted_drafts, state.drafts.accepted_tokens)
        for rule, gauge in own.no_drafts.items():
            gauge.set(rule == state.drafts.rule)
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
        self._goodput.set_target(throttle.knobs)
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
        own.microbatch_tokens["draft"].set(newest.draft_tokens)
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
