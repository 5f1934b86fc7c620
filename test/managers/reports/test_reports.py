"""Every event reaches every sink in order, and a new kind of event needs no sink changed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from support.moves import abandoned_move, begun_move, done_move, movable_core
from support.step_records import recovery_record, step_record, throttle_change
from support.traced_events import read_events

from sgl_pipeline.managers.reports.reports import Reports
from sgl_pipeline.managers.reports.trace_files import TraceFiles
from sgl_pipeline.records.chrome_trace import ChromeTraceWriter
from sgl_pipeline.records.event import Event
from sgl_pipeline.records.trace import TraceWriter, read_trace


class Sink:
    """Stands for metrics, loads and live page, and keeps what each is given."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.states: list[Any] = []
        self.ended: Any = lambda requests: None
        self.booked: Any = lambda step: None

    def on(self, event: Event) -> None:
        self.events.append(event)

    def publish(self, *reported: Any) -> Any:
        self.states.append(reported)
        return "load"


class CardWarning(msgspec.Struct, Event, frozen=True):
    """A kind of event that no sink knows."""

    trace_key: ClassVar[str] = "card_warning"

    stage: int


def reports_of(traces: TraceFiles, metrics: Any = None, live: Any = None) -> Reports:
    return Reports({"policy": "no-ut"}, "off", traces, Sink(), metrics, live)  # type: ignore[arg-type]


def test_every_event_reaches_every_sink_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    metrics = Sink()
    reports = reports_of(TraceFiles([TraceWriter(tmp_path / "trace")]), metrics)
    events: list[Event] = [begun_move(), step_record(0), done_move(), throttle_change()]
    reports.on(events)
    reports.on([recovery_record(), abandoned_move()])
    reports.traces.close()
    assert metrics.events == [*events, recovery_record(), abandoned_move()]
    lines = (tmp_path / "trace").read_text().splitlines()
    starts = ["step_id", "layer_move", "throttle_change", "recovery", "layer_move"]
    assert [line.split('"')[1] for line in lines] == starts
    assert len(caplog.messages) == 4


def test_a_new_kind_of_event_is_a_record_and_a_line_in_the_core(tmp_path: Path) -> None:
    """It is in the trace; the sinks that do not care stay as they are."""
    core, chrome = movable_core(2, 2), ChromeTraceWriter(tmp_path / "chrome.json")
    reports = reports_of(TraceFiles([TraceWriter(tmp_path / "trace"), chrome]))
    core.events.append(CardWarning(stage=1))
    core.events.append(step_record(0))
    reports.on(core.take_events())
    reports.traces.close()
    assert list(read_events(tmp_path / "trace", CardWarning)) == [CardWarning(stage=1)]
    assert list(read_trace(tmp_path / "trace")) == [step_record(0)]
    assert "step 0" in (tmp_path / "chrome.json").read_text()


def test_the_state_is_published_to_all_and_metrics_get_the_load_with_it() -> None:
    metrics, live = Sink(), Sink()
    reports = reports_of(TraceFiles(), metrics, live)
    state = movable_core(2, 2).state(1.0)
    reports.publish(state)
    assert (metrics.states, live.states) == ([("load", state)], [(state,)])
    described = reports.describe(state)
    assert (described["policy"], described["num_stages"]) == ("no-ut", 2)


def test_a_booked_step_is_counted_and_shown() -> None:
    metrics, live = Sink(), Sink()
    told: list[Any] = []
    metrics.ended = live.booked = told.append
    step: Any = SimpleNamespace(ended=("a",))
    reports_of(TraceFiles(), metrics, live).booked(step)
    assert told == [("a",), step]
