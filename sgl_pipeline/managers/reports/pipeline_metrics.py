"""Our own metrics of the pipeline on `/metrics`: names, texts and labels.

`metrics_report.py` writes their values. Their names begin with `sgl_pipeline_`.
"""

from collections.abc import Iterable, Sequence
from typing import get_args

from prometheus_client import Counter, Gauge, Histogram

from sgl_pipeline.args import POLICIES
from sgl_pipeline.pipeline.step_history import RECENT_STEPS
from sgl_pipeline.records.stage_timing import BUBBLE_CAUSES
from sgl_pipeline.records.throttle_change import Cause
from sgl_pipeline.scheduling.draft_reasons import RULES_OF_ALL
from sgl_pipeline.throttle import Bound, Target

_RECOVERY_SECONDS = (0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0, 120.0)
_HANDOVER_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_KNOBS = (
    *("prefill_spread_steps", "max_prefill_tokens", "min_prefill_tokens", "pause_free_share"),
    "ttft_weight",
)
_MOVE_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class PipelineMetrics:
    """One attribute for each. The tokens of a microbatch are rate(step_tokens) / rate(steps).

    Args:
        labels: of all of them.
        num_stages: those that the server was started with.
    """

    def __init__(self, labels: dict[str, str], num_stages: int) -> None:
        self.labels = labels
        self._stages = [str(stage) for stage in range(num_stages)]
        self._add_moves()
        self._add_throttle()
        self._add_drafts()
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
            "microbatch_tokens", "Tokens of the newest step.", "kind", (*kinds, "draft")
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
            "step_tokens", "Tokens of the steps scheduled.", "kind", (*kinds, "draft")
        )

    def _add_drafts(self) -> None:
        """Adds metrics of drafts beside SGLang's (`spec_*`)."""
        accepted = self._counter("accepted_draft_tokens", "Draft tokens that were right.")
        self.accepted_drafts = accepted.labels(**self.labels)
        self.no_drafts = self._gauges(
            "no_drafts", "1 for the rule by which no request has drafts now.", "rule", RULES_OF_ALL
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
        self.goodput_requests = self._counters(
            "goodput_requests",
            "Requests that ended by themselves while there was a target, and whether within it.",
            "within_targets",
            ("true", "false"),
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
