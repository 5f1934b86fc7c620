"""A stage that is slow gets a line, and another when it is not any more; nothing between."""

import logging

import msgspec
import pytest
from support.moves import movable_core

from sgl_pipeline.args import MIGRATION_MODES
from sgl_pipeline.managers.reports.interval_line import status_line
from sgl_pipeline.managers.reports.server_info import describe_state
from sgl_pipeline.managers.reports.slow_stage_log import SlowStageLog
from sgl_pipeline.pipeline.pipeline_state import PipelineState
from sgl_pipeline.stage_plan import StagePlan


def state_at(now_s: float, slowdown: float = 1.0, since_s: float | None = None) -> PipelineState:
    """Of two stages, the second of which is that slow."""
    state = movable_core(2, 2).state(now_s)
    first, second = state.stages
    slow = msgspec.structs.replace(second, slowdown=slowdown, slow_since_s=since_s)
    return msgspec.structs.replace(state, stages=(first, slow))


def test_a_line_for_each_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = SlowStageLog("off")
    for state in (
        state_at(5.0),
        state_at(16.0, 4.25, 10.0),
        state_at(20.0, 3.0, 10.0),
        state_at(70.0, 1.1),
        state_at(71.0),
    ):
        log.report(state)
    assert caplog.messages == [
        "stage 1 is slow: for 6 s its steps have taken 4.2 times what is predicted; see what else "
        "runs on its cores; its layers stay, as --migration is off; with auto they move to faster "
        "stages",
        "stage 1 is as fast as before, after 60 s: 1.1 times what is predicted",
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_of_a_stage_that_is_none_any_more_nothing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    log = SlowStageLog("off")
    log.report(state_at(16.0, 4.25, 10.0))
    fewer = msgspec.structs.replace(state_at(20.0), plan=StagePlan(1, (4,)))
    log.report(fewer)
    log.report(state_at(30.0, 4.25, 25.0))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


@pytest.mark.parametrize("mode", MIGRATION_MODES)
def test_the_line_says_what_layers_do_about_it(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    SlowStageLog(mode).report(state_at(16.0, 4.0, 10.0))
    assert "--migration" in caplog.text


def test_server_info_and_the_status_line_have_it() -> None:
    slow = state_at(16.0, 4.25, 10.0)
    assert describe_state(slow)["slow_stages"] == [{"stage": 1, "slowdown": 4.25, "for_s": 6.0}]
    assert describe_state(state_at(5.0))["slow_stages"] == []
    assert ", stage 1 slow (4.2 times)" in status_line(state_at(6.0), slow)
