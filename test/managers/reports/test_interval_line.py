"""A line every ten seconds under load, none while idle."""

import logging
from typing import Any

import msgspec
import pytest
from support.moves import movable_core, stages_get_ready, stages_switch
from support.pipelines import FakePipeline, make_request, new_pipeline

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.managers.reports.interval_line import IntervalLine, status_line
from sgl_pipeline.pipeline.draft_state import DraftState


@pytest.fixture
def pipeline() -> FakePipeline:
    return new_pipeline(
        SchedulingArgs(page_size=4, max_running_requests=2),
        num_pages=40,
        num_stages=1,
        context_length=128,
    )


def lines(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_line_says_what_waits_runs_and_was_done(
    pipeline: FakePipeline, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    status = IntervalLine()
    for name in "abc":
        pipeline.scheduler.add(make_request(name, [ord(name)] * 16, 50))
    status.report(pipeline.core.state(100.0))
    for _ in range(20):
        pipeline.fill()
        pipeline.complete()
    status.report(pipeline.core.state(109.0))
    assert lines(caplog) == []
    status.report(pipeline.core.state(110.0))
    assert lines(caplog) == [
        "step 20: waiting 1 (16 tokens), running 2, free pages 55%, "
        f"{(pipeline.core.history.prefill_tokens + pipeline.core.history.decodes) / 10:.0f} "
        "tokens/s, stages idle 100%"
    ]
    pipeline.scheduler.pausing.pause(retract=False)
    status.report(pipeline.core.state(120.0))
    assert "step 20, paused: " in lines(caplog)[1] and " 0 tokens/s" in lines(caplog)[1]


def test_an_idle_server_says_nothing_and_the_next_interval_begins_with_the_next_request(
    pipeline: FakePipeline, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    status = IntervalLine()
    for now_s in range(0, 100, 5):
        status.report(pipeline.core.state(now_s))
    pipeline.scheduler.add(make_request("a", [1] * 16, 50))
    status.report(pipeline.core.state(100.0))
    status.report(pipeline.core.state(109.9))
    assert lines(caplog) == []


def test_the_line_says_how_many_state_slots_are_free(pipeline: FakePipeline) -> None:
    before, now = pipeline.core.state(0.0), pipeline.core.state(10.0)
    assert "state slots" not in status_line(before, now)
    now = msgspec.structs.replace(now, state_slots=8, free_state_slots=3, evictable_state_slots=2)
    assert ", free state slots 5 of 8, " in status_line(before, now)


def test_the_line_says_what_drafts_were_worth_or_why_there_were_none(
    pipeline: FakePipeline,
) -> None:
    pipeline.scheduler.add(make_request("a", [1] * 16, 50))
    before = pipeline.core.state(0.0)
    now = pipeline.core.state(10.0)
    assert "draft" not in status_line(before, now)

    def with_drafts(**counted: Any) -> str:
        drafts = DraftState(most_each=3, **counted)
        return status_line(before, msgspec.structs.replace(now, drafts=drafts))

    counted = with_drafts(steps=4, drafted_tokens=12, accepted_tokens=6, rule="time", reason="why")
    assert ", 6 of 12 draft tokens right (2.5 tokens a decode with drafts), stages" in counted
    assert ", no drafts (why), stages idle" in with_drafts(rule="time", reason="why")
    assert "draft" not in with_drafts(rule="idle", reason="no request decodes")


def test_the_line_says_that_layers_move(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    core, status = movable_core(2, 2), IntervalLine()
    core.scheduler.add(make_request("a", [1] * 16, 50))
    status.report(core.state(100.0))
    core.migration.move_to((1, 3), 109.0)
    status.report(core.state(110.0))
    stages_get_ready(core, 111.0)
    stages_switch(core, 112.0)
    status.report(core.state(120.0))
    moving, moved = lines(caplog)
    assert moving.startswith("step 0, moving layers to 1,3: waiting 1")
    assert moved.startswith("step 0: waiting 1")
