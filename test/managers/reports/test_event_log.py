"""A move gets a line when it begins and one when it is over, a change of the throttle one."""

import logging

import pytest
from support.moves import abandoned_move, begun_move, done_move
from support.step_records import step_record, throttle_change

from sgl_pipeline.managers.reports.event_log import log_event


def test_a_move_gets_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for event in (begun_move(), step_record(0), done_move(), abandoned_move()):
        log_event(event)
    assert caplog.messages == [
        "layer move 3 (operator): 2,2 to 1,3 begins",
        "layer move 3 (operator): 2,2 to 1,3 done in 500 ms: 1.00 MiB copied, 0.25 MiB patched, a "
        "step held up for at most 2.0 ms",
        "layer move 4 (auto): 1,3 to 2,2 abandoned after 500 ms: stage 1: no memory",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"]


def test_the_line_of_a_change_has_author_values_and_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_event(throttle_change())
    assert caplog.messages == [
        "throttle change 3 (operator, key admin, client 10.0.0.1): prefill_spread_steps 8 to 4, "
        "max_prefill_tokens None to 512, from step 7 on, for 60 s"
    ]
