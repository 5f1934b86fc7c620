"""The Chrome trace is whole at any moment, and its spans are those of the steps."""

import json
from pathlib import Path
from typing import Any

import msgspec
from support.moves import abandoned_move, done_move
from support.step_records import recovery_record, step_record

from sgl_pipeline.records.chrome_trace import ChromeTraceWriter
from sgl_pipeline.records.stage_timing import StageTiming


def events_of(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert {event["pid"]} == {1} and isinstance(event["tid"], int)
        assert event["ph"] in ("X", "M", "i")
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
    return events


def test_the_file_is_whole_after_each_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    writer = ChromeTraceWriter(path)
    writer.flush()
    assert len(events_of(path)) == 1
    sizes = []
    for step_id in range(3):
        writer.write(step_record(step_id))
        writer.flush()
        sizes.append(len(events_of(path)))
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0
    writer.close()
    assert len(events_of(path)) == sizes[2]


def test_each_stage_has_a_track_with_what_it_did_when(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    first = step_record(0)
    second = StageTiming(11.0, 12.0, 12.25, 12.75, 13.0, 13.5, 13.625)
    record = msgspec.structs.replace(first, scheduled_s=11.5, stages=(first.stages[0], second))
    writer = ChromeTraceWriter(path)
    writer.write(record)
    writer.close()
    events = events_of(path)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "scheduler", 1: "stage 0", 2: "stage 1"}
    spans = [
        (e["name"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in events
        if (e["tid"], e["ph"]) == (2, "X")
    ]
    assert spans == [
        ("metadata", 11.5, 0.75),
        ("activations", 12.25, 0.5),
        ("step 0", 12.75, 0.75),
        ("send", 13.5, 0.125),
    ]
    (decided,) = (e for e in events if e["name"] == "schedule step 0")
    assert decided["args"]["bound_by"] == "MinP" and decided["args"]["prefill_tokens"] == 5
    (computed,) = (e for e in events if e["name"] == "step 0" and e["tid"] == 1)
    drafts = {"draft_tokens": 0, "accepted_draft_tokens": 0}
    assert computed["args"] == {"prefill_tokens": 5, "decodes": 1} | drafts


def test_layer_moves_have_a_track_and_their_switch_crosses_all_tracks(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    writer = ChromeTraceWriter(path)
    writer.write(done_move())
    writer.write(step_record(0))
    writer.write(abandoned_move())
    writer.close()
    events = events_of(path)
    tracks = [e for e in events if e["name"] == "thread_name"]
    (moves_track,) = (e["tid"] for e in tracks if e["args"]["name"] == "layer moves")
    assert len(tracks) == 4 and moves_track > max(t["tid"] for t in tracks[1:])
    told = [
        (e["name"], e["ph"], e["ts"] / 1e6, e.get("dur", 0) / 1e6)
        for e in events
        if e["tid"] == moves_track and e["ph"] != "M"
    ]
    assert told == [
        ("prepare 1,3", "X", 10.0, 0.25),
        ("switch to 1,3", "i", 10.25, 0.0),
        ("patch 1,3", "X", 10.25, 0.25),
        ("prepare 2,2", "X", 20.0, 0.5),
        ("abandon 2,2", "i", 20.5, 0.0),
    ]
    instants = [e for e in events if e["ph"] == "i"]
    assert {e["s"] for e in instants} == {"p"}
    assert instants[0]["args"]["patched_bytes"] == 2**18
    assert instants[1]["args"]["reason"] == "stage 1: no memory"


def test_a_recovery_is_a_mark_across_all_tracks_and_a_span_on_its_own(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    writer = ChromeTraceWriter(path)
    for _ in range(2):
        writer.write(recovery_record())
    writer.close()
    events = events_of(path)
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["recoveries"]
    mark, span = events[2:4]
    assert (mark["name"], mark["ph"], mark["s"], mark["ts"]) == ("stage 1 lost", "i", "p", 10e6)
    assert (span["name"], span["ts"], span["dur"]) == ("recovery: stage 1 lost", 10e6, 2.5e6)
    assert span["args"]["lost"] == [
        {"worker": 4, "stage": 1, "reason": "killed", "has_left": False}
    ]
