"""Every writer gets the steps and moves that end while it is there, and a full disk ends only its
trace."""

import json
from pathlib import Path

import pytest
from support.moves import abandoned_move, done_move
from support.step_records import recovery_record, step_record

from sgl_pipeline.managers.reports.trace_files import TraceFiles
from sgl_pipeline.records.chrome_trace import ChromeTraceWriter
from sgl_pipeline.records.throttle_change import Author, ThrottleChange
from sgl_pipeline.records.trace import (
    TraceWriter,
    read_changes,
    read_moves,
    read_recoveries,
    read_trace,
)


def test_a_writer_gets_the_steps_that_end_while_it_is_there(tmp_path: Path) -> None:
    traces = TraceFiles()
    writer = TraceWriter(tmp_path / "trace")
    traces.write([step_record(0)])
    traces.add(writer)
    traces.write([step_record(1), step_record(2)])
    traces.remove(writer)
    traces.write([step_record(3)])
    assert list(read_trace(tmp_path / "trace")) == [step_record(1), step_record(2)]


def test_a_full_disk_ends_one_trace_and_neither_the_server_nor_another(tmp_path: Path) -> None:
    class FullDisk(TraceWriter):
        num_flushes = 0

        def flush(self) -> None:
            self.num_flushes += 1
            raise OSError("no space left on device")

    full, whole = FullDisk(tmp_path / "trace"), TraceWriter(tmp_path / "whole")
    traces = TraceFiles([full, whole])
    traces.write([step_record(0)])
    traces.write([step_record(1)])
    traces.close()
    assert full.num_flushes == 1
    assert len(list(read_trace(tmp_path / "whole"))) == 2


def test_layer_moves_are_lines_among_the_steps(tmp_path: Path) -> None:
    traces = TraceFiles([TraceWriter(tmp_path / "trace")])
    traces.write([step_record(0)])
    traces.write_moves([done_move()])
    traces.write([step_record(1)])
    traces.write_moves([abandoned_move()])
    traces.close()
    assert list(read_trace(tmp_path / "trace")) == [step_record(0), step_record(1)]
    assert list(read_moves(tmp_path / "trace")) == [done_move(), abandoned_move()]


def test_a_full_disk_met_by_a_move_ends_the_trace_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(TraceWriter):
        def flush(self) -> None:
            raise OSError("no space left on device")

    traces = TraceFiles([FullDisk(tmp_path / "trace")])
    traces.write_moves([done_move(), abandoned_move()])
    assert caplog.messages == ["the trace ends with layer move 3: no space left on device"]


def throttle_change() -> ThrottleChange:
    return ThrottleChange(
        change=3,
        cause="operator",
        author=Author("admin", "10.0.0.1"),
        changed_s=10.5,
        first_step=7,
        before={"prefill_spread_steps": 8, "max_prefill_tokens": None},
        after={"prefill_spread_steps": 4, "max_prefill_tokens": 512},
        revert_after_s=60.0,
    )


def test_changes_of_the_throttle_are_lines_among_the_steps_and_marks(tmp_path: Path) -> None:
    chrome = ChromeTraceWriter(tmp_path / "chrome.json")
    traces = TraceFiles([TraceWriter(tmp_path / "trace"), chrome])
    traces.write([step_record(0)])
    traces.write_changes([throttle_change()])
    traces.write([step_record(1)])
    traces.close()
    assert list(read_trace(tmp_path / "trace")) == [step_record(0), step_record(1)]
    assert list(read_changes(tmp_path / "trace")) == [throttle_change()]
    events = json.loads((tmp_path / "chrome.json").read_text())
    (mark,) = [event for event in events if event["ph"] == "i"]
    assert mark["name"] == "throttle: prefill_spread_steps 4, max_prefill_tokens 512"
    assert (mark["ts"], mark["tid"], mark["s"]) == (10.5e6, 0, "p")
    assert mark["args"]["before"] == {"prefill_spread_steps": 8, "max_prefill_tokens": None}
    assert mark["args"]["first_step"] == 7


def test_recoveries_are_lines_among_the_steps(tmp_path: Path) -> None:
    traces = TraceFiles([TraceWriter(tmp_path / "trace")])
    traces.write([step_record(0)])
    traces.write_recoveries([recovery_record()])
    traces.write_moves([done_move()])
    traces.close()
    assert list(read_trace(tmp_path / "trace")) == [step_record(0)]
    assert list(read_recoveries(tmp_path / "trace")) == [recovery_record()]
    assert list(read_moves(tmp_path / "trace")) == [done_move()]
