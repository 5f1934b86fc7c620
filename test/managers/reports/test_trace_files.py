"""Every writer gets the events that end while it is there, and a full disk ends only its trace."""

import json
from pathlib import Path

import msgspec
import pytest
from support.moves import abandoned_move, begun_move, done_move
from support.step_records import recovery_record, step_record, throttle_change
from support.traced_events import read_events

from sgl_pipeline.managers.reports.trace_files import TraceFiles
from sgl_pipeline.records.chrome_trace import ChromeTraceWriter
from sgl_pipeline.records.move_record import MoveRecord
from sgl_pipeline.records.recovery_record import RecoveryRecord
from sgl_pipeline.records.throttle_change import ThrottleChange
from sgl_pipeline.records.trace import TraceWriter, read_trace


def test_a_writer_gets_the_steps_that_end_while_it_is_there(tmp_path: Path) -> None:
    traces = TraceFiles()
    writer = TraceWriter(tmp_path / "trace")
    traces.on(step_record(0))
    traces.add(writer)
    traces.on(step_record(1))
    traces.on(step_record(2))
    traces.remove(writer)
    traces.on(step_record(3))
    assert list(read_trace(tmp_path / "trace")) == [step_record(1), step_record(2)]


def test_a_full_disk_ends_one_trace_and_neither_the_server_nor_another(tmp_path: Path) -> None:
    class FullDisk(TraceWriter):
        num_flushes = 0

        def flush(self) -> None:
            self.num_flushes += 1
            raise OSError("no space left on device")

    full, whole = FullDisk(tmp_path / "trace"), TraceWriter(tmp_path / "whole")
    traces = TraceFiles([full, whole])
    traces.on(step_record(0))
    traces.on(step_record(1))
    traces.close()
    assert full.num_flushes == 1
    assert len(list(read_trace(tmp_path / "whole"))) == 2


def test_layer_moves_are_lines_among_the_steps(tmp_path: Path) -> None:
    traces = TraceFiles([TraceWriter(tmp_path / "trace")])
    traces.on(step_record(0))
    traces.on(begun_move())
    traces.on(done_move())
    traces.on(step_record(1))
    traces.on(abandoned_move())
    traces.close()
    assert list(read_trace(tmp_path / "trace")) == [step_record(0), step_record(1)]
    assert list(read_events(tmp_path / "trace", MoveRecord)) == [done_move(), abandoned_move()]


def test_a_full_disk_met_by_a_move_ends_the_trace_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(TraceWriter):
        def flush(self) -> None:
            raise OSError("no space left on device")

    traces = TraceFiles([FullDisk(tmp_path / "trace")])
    traces.on(done_move())
    traces.on(abandoned_move())
    assert caplog.messages == ["the trace ends with layer move 3: no space left on device"]


def test_changes_of_the_throttle_are_lines_among_the_steps_and_marks(tmp_path: Path) -> None:
    chrome = ChromeTraceWriter(tmp_path / "chrome.json")
    traces = TraceFiles([TraceWriter(tmp_path / "trace"), chrome])
    traces.on(step_record(0))
    traces.on(throttle_change())
    traces.on(step_record(1))
    traces.close()
    assert list(read_trace(tmp_path / "trace")) == [step_record(0), step_record(1)]
    assert list(read_events(tmp_path / "trace", ThrottleChange)) == [throttle_change()]
    events = json.loads((tmp_path / "chrome.json").read_text())
    (mark,) = [event for event in events if event["ph"] == "i"]
    assert mark["name"] == "throttle: prefill_spread_steps 4, max_prefill_tokens 512"
    assert (mark["ts"], mark["tid"], mark["s"]) == (10.5e6, 0, "p")
    assert mark["args"]["before"] == {"prefill_spread_steps": 8, "max_prefill_tokens": None}
    assert mark["args"]["first_step"] == 7


def test_recoveries_are_lines_among_the_steps(tmp_path: Path) -> None:
    traces = TraceFiles([TraceWriter(tmp_path / "trace")])
    traces.on(step_record(0))
    traces.on(recovery_record())
    traces.on(done_move())
    traces.close()
    assert list(read_trace(tmp_path / "trace")) == [step_record(0)]
    assert list(read_events(tmp_path / "trace", RecoveryRecord)) == [recovery_record()]
    assert list(read_events(tmp_path / "trace", MoveRecord)) == [done_move()]


def test_a_line_is_the_step_itself_or_an_object_with_the_key_of_its_kind(tmp_path: Path) -> None:
    events = [step_record(0), done_move(), throttle_change(), recovery_record()]
    traces = TraceFiles([TraceWriter(tmp_path / "trace")])
    for event in events:
        traces.on(event)
    traces.close()
    lines = (tmp_path / "trace").read_bytes().splitlines()
    keys = [b'{"step_id":0', b'{"layer_move":{', b'{"throttle_change":{', b'{"recovery":{']
    assert [line[: len(key)] for line, key in zip(lines, keys, strict=True)] == keys


def test_a_line_that_is_no_event_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(b'{"name": "process_name"}\n')
    with pytest.raises(msgspec.ValidationError, match="step_id"):
        list(read_trace(tmp_path / "trace"))
    (tmp_path / "trace").write_bytes(b'{"layer_move":{"move":1}}\n')
    assert list(read_trace(tmp_path / "trace")) == []
    with pytest.raises(msgspec.ValidationError, match="epoch"):
        list(read_events(tmp_path / "trace", MoveRecord))
