"""All that the server reports of itself: each event to each sink, the state to who publishes it."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sgl_pipeline.managers.reports.event_log import log_event
from sgl_pipeline.managers.reports.interval_line import IntervalLine
from sgl_pipeline.managers.reports.load_report import LoadReport
from sgl_pipeline.managers.reports.server_info import describe_state
from sgl_pipeline.managers.reports.slow_stage_log import SlowStageLog
from sgl_pipeline.managers.reports.trace_files import TraceFiles
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.pipeline.pipeline_state import PipelineState
from sgl_pipeline.records.event import Event
from sgl_pipeline.requests import Request

if TYPE_CHECKING:
    from sgl_pipeline.managers.reports.live_report import LiveReport
    from sgl_pipeline.managers.reports.metrics_report import MetricsReport


class Reports:
    """Traces, metrics, loads, log and live page of one server.

    Args:
        facts: how the pipeline was started, for `/server_info`; JSON types only.
        migration: the mode of `args.MIGRATION_MODES` in force.
        metrics: None without `--enable-metrics`.
        live: None with `--ui off`.
    """

    def __init__(
        self,
        facts: Mapping[str, Any],
        migration: str,
        traces: TraceFiles,
        loads: LoadReport,
        metrics: "MetricsReport | None" = None,
        live: "LiveReport | None" = None,
    ) -> None:
        self.traces = traces
        self._facts = facts
        self._loads = loads
        self._metrics = metrics
        self._live = live
        self._interval_line = IntervalLine()
        self._slow_stages = SlowStageLog(migration)
        self._sinks: list[Callable[[Event], None]] = [log_event, traces.on]
        if metrics is not None:
            self._sinks.append(metrics.on)

    def on(self, events: Iterable[Event]) -> None:
        """Gives events to every sink, in their order."""
        for event in events:
            for sink in self._sinks:
                sink(event)

    def arrived(self, request: Request) -> None:
        """A request has joined the queue."""
        if self._live is not None:
            self._live.arrived(request)

    def booked(self, step: OpenStep) -> None:
        """The tokens of a step are known; its record follows when all stages have reported it."""
        if self._metrics is not None:
            self._metrics.ended(step.ended)
        if self._live is not None:
            self._live.booked(step)

    def publish(self, state: PipelineState) -> None:
        """To be called several times a second: each report looks whether it is time."""
        load = self._loads.publish(state)
        if self._metrics is not None:
            self._metrics.publish(load, state)
        if self._live is not None:
            self._live.publish(state)
        self._interval_line.report(state)
        self._slow_stages.report(state)

    def describe(self, state: PipelineState) -> dict[str, Any]:
        """Facts for `/server_info`: the pipeline as it was started, and its state."""
        return {**self._facts, **describe_state(state)}
