import gzip
import json
from pathlib import Path

import torch

from sgl_pipeline.pp_runner.stage_profile import StageProfile
from sgl_pipeline.wire.stage_messages import ProfileReply, StartProfile


def order(path: Path, num_steps: int | None = None, activities: tuple[str, ...] = ("CPU",)):
    return StartProfile(
        path=str(path),
        activities=activities,
        with_stack=False,
        record_shapes=False,
        num_steps=num_steps,
    )


def run_step(profile: StageProfile) -> ProfileReply | None:
    torch.ones(8) @ torch.ones(8)
    return profile.step_done()


def names_of(path: Path) -> set[str]:
    with gzip.open(path) as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


def test_a_recording_ends_when_it_is_told_to(tmp_path):
    path = tmp_path / "new" / "a.trace.json.gz"
    profile = StageProfile(1, has_gpu=False)
    assert profile.start(order(path)) == ProfileReply(1, is_recording=True)
    assert run_step(profile) is None
    assert profile.stop() == ProfileReply(1, is_recording=False)
    assert "aten::dot" in names_of(path)
    assert profile.stop() == ProfileReply(1, is_recording=False)


def test_a_recording_ends_after_its_last_step(tmp_path):
    path = tmp_path / "a.trace.json.gz"
    profile = StageProfile(0, has_gpu=False)
    profile.start(order(path, num_steps=2))
    assert run_step(profile) is None
    assert run_step(profile) == ProfileReply(0, is_recording=False)
    assert run_step(profile) is None
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "aten::dot" for event in events) == 2


def test_what_cannot_be_written_is_refused_and_the_next_one_is_not(tmp_path):
    (tmp_path / "file").write_text("")
    profile = StageProfile(0, has_gpu=False)
    refused = profile.start(order(tmp_path / "file" / "a.trace.json.gz"))
    assert not refused.is_recording and "file" in refused.error
    assert profile.start(order(tmp_path / "a.trace.json.gz")).is_recording
    assert profile.start(order(tmp_path / "b.trace.json.gz")).error
    profile.stop()


def test_a_trace_that_has_lost_its_directory_is_an_error_and_no_exception(tmp_path):
    path = tmp_path / "gone" / "a.trace.json.gz"
    profile = StageProfile(0, has_gpu=False)
    profile.start(order(path))
    path.unlink()
    path.parent.rmdir()
    reply = profile.stop()
    assert reply.error and not reply.is_recording


def test_a_gpu_alone_cannot_be_profiled_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reply = StageProfile(0, has_gpu=False).start(
        order(tmp_path / "a.trace.json.gz", activities=("GPU",))
    )
    assert "no GPU" in reply.error
