"""A profile is answered when all stages have answered; what goes wrong is told, and undone."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import io_struct as io
from support.step_records import step_record

from sgl_pipeline.managers.reports.profiles import Profiles
from sgl_pipeline.managers.reports.trace_files import TraceFiles
from sgl_pipeline.wire.stage_messages import ProfileReply, StartProfile, StopProfile

STOP = io.ProfileReq(req_type=io.ProfileReqType.STOP_PROFILE)


class Desk:
    """A desk of two stages; `sent` holds what each was told."""

    def __init__(self) -> None:
        self.traces = TraceFiles()
        self.replies: list[io.ProfileReqOutput] = []
        self.sent: dict[int, list[Any]] = {0: [], 1: []}
        front = SimpleNamespace(reply=lambda message, to: self.replies.append(message))
        channel = SimpleNamespace(
            send=lambda stage, message: self.sent[stage].append(message),
            has_vacant_stage=False,
            stages=range(2),
        )
        self.stages = channel
        self.desk = Profiles(front, channel, self.traces)

    def ask(self, message: Any) -> None:
        self.desk.answer(message)

    def stage_says(self, stage: int, *, is_recording: bool, error: str = "") -> None:
        self.desk.on_reply(ProfileReply(stage, is_recording, error))

    def start(self) -> None:
        self.ask(io.ProfileReq(profile_id="1"))
        for stage in range(2):
            self.stage_says(stage, is_recording=True)
        assert self.last().success

    def last(self) -> io.ProfileReqOutput:
        return self.replies[-1]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Without a word about where to, it writes to `tmp_path`."""
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", str(tmp_path))
    return Desk()


def test_files_are_named_as_upstreams_and_lie_where_they_were_asked_for(
    desk: Desk, tmp_path: Path
) -> None:
    desk.ask(
        io.ProfileReq(
            output_dir=str(tmp_path / "traces"),
            profile_id="12.5",
            profile_prefix="decode",
            num_steps=3,
            activities=["CPU"],
            with_stack=False,
        )
    )
    (order,) = desk.sent[1]
    assert order == StartProfile(
        path=f"{tmp_path}/traces/decode-12.5-TP-0-PP-1.trace.json.gz",
        activities=("CPU",),
        with_stack=False,
        record_shapes=False,
        num_steps=3,
    )
    other = Desk()
    other.ask(io.ProfileReq(profile_id="7"))
    assert other.sent[0][0].path == f"{tmp_path}/7-TP-0-PP-0.trace.json.gz"


def test_the_steps_that_end_while_a_stage_records_are_written_beside_its_trace(
    desk: Desk, tmp_path: Path
) -> None:
    desk.traces.on(step_record(0))
    desk.start()
    desk.traces.on(step_record(1))
    desk.stage_says(0, is_recording=False)
    desk.traces.on(step_record(2))
    desk.stage_says(1, is_recording=False)
    desk.traces.on(step_record(3))
    events = json.loads((tmp_path / "1-steps.trace.json").read_text())
    names = {event["name"] for event in events}
    assert {"step 1", "step 2"} <= names and not {"step 0", "step 3"} & names


def test_a_folder_that_cannot_be_made_is_told_before_any_stage_records(
    desk: Desk, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    desk.ask(io.ProfileReq(profile_id="1", output_dir=str(tmp_path / "file")))
    assert not desk.last().success and "FileExistsError" in desk.last().message
    assert desk.sent == {0: [], 1: []}


def test_a_start_and_a_stop_are_answered_by_the_last_stage(desk: Desk) -> None:
    desk.ask(io.ProfileReq(profile_id="1"))
    desk.stage_says(0, is_recording=True)
    assert desk.replies == []
    desk.stage_says(1, is_recording=True)
    assert desk.last().success
    desk.ask(STOP)
    assert desk.sent[1][-1] == StopProfile()
    desk.stage_says(1, is_recording=False)
    assert len(desk.replies) == 1
    desk.stage_says(0, is_recording=False)
    assert desk.last().success


def test_a_stage_that_cannot_write_makes_the_start_fail_and_the_others_stop(desk: Desk) -> None:
    desk.ask(io.ProfileReq(profile_id="1"))
    desk.stage_says(0, is_recording=True)
    desk.stage_says(1, is_recording=False, error="PermissionError: /traces")
    assert not desk.last().success
    assert desk.last().message == "stage 1: PermissionError: /traces"
    assert desk.sent[0][-1] == StopProfile()


def test_a_trace_that_cannot_be_written_makes_the_stop_fail(desk: Desk) -> None:
    desk.start()
    desk.ask(STOP)
    desk.stage_says(0, is_recording=False, error="OSError: disk full")
    desk.stage_says(1, is_recording=False)
    assert not desk.last().success and "disk full" in desk.last().message


def test_one_profile_at_a_time(desk: Desk) -> None:
    desk.ask(STOP)
    assert "not in progress" in desk.last().message
    desk.ask(io.ProfileReq(profile_id="1"))
    desk.ask(STOP)
    assert "being answered" in desk.last().message
    for stage in range(2):
        desk.stage_says(stage, is_recording=True)
    desk.ask(io.ProfileReq(profile_id="2"))
    assert "already in progress" in desk.last().message


def test_a_profile_that_ended_by_itself_makes_room_for_the_next(desk: Desk) -> None:
    desk.start()
    for stage in range(2):
        desk.stage_says(stage, is_recording=False)
    desk.ask(STOP)
    assert not desk.last().success
    desk.start()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("start_step", 5),
        ("profile_by_stage", True),
        ("profile_stages", ["decode"]),
        ("merge_profiles", True),
        ("detailed_annotations", True),
        ("activities", ["CPU", "RPD"]),
        ("num_steps", -1),
        ("profile_id", "../etc"),
        ("profile_prefix", "a/b"),
    ],
)
def test_an_option_that_is_not_supported_is_named(desk: Desk, option: str, value: Any) -> None:
    desk.ask(io.ProfileReq(**({"profile_id": "1"} | {option: value})))
    assert not desk.last().success
    assert option in desk.last().message
    assert desk.sent == {0: [], 1: []}


def test_a_stage_lost_while_it_records_is_told_and_the_others_go_on(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.start()
    desk.desk.on_lost(1)
    assert "stage 1: it was lost while it recorded" in caplog.text
    assert desk.sent[0][-1].__class__ is StartProfile
    desk.ask(STOP)
    desk.stage_says(0, is_recording=False)
    assert desk.last().success


def test_a_request_that_waits_for_a_lost_stage_fails_with_its_name(desk: Desk) -> None:
    desk.ask(io.ProfileReq(profile_id="1"))
    desk.stage_says(0, is_recording=True)
    desk.desk.on_lost(1)
    assert not desk.last().success and "stage 1: it was lost" in desk.last().message
    assert isinstance(desk.sent[0][-1], StopProfile)


def test_the_loss_of_a_stage_that_records_nothing_means_nothing(desk: Desk) -> None:
    desk.desk.on_lost(1)
    assert desk.replies == []


def test_no_profile_begins_while_a_stage_is_replaced(desk: Desk) -> None:
    desk.stages.has_vacant_stage = True
    desk.ask(io.ProfileReq(profile_id="1"))
    assert "being replaced" in desk.last().message
    assert desk.sent == {0: [], 1: []}
