"""A move gets a line when it begins and one when it is over."""

import logging

import pytest
from support.moves import abandoned_move, done_move

from sgl_pipeline.managers.reports.move_report import log_begun, log_ended


def test_a_move_gets_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_begun(done_move())
    log_ended(done_move())
    log_ended(abandoned_move())
    assert caplog.messages == [
        "layer move 3 (operator): 2,2 to 1,3 begins",
        "layer move 3 (operator): 2,2 to 1,3 done in 500 ms: 1.00 MiB copied, 0.25 MiB patched, a "
        "step held up for at most 2.0 ms",
        "layer move 4 (auto): 1,3 to 2,2 abandoned after 500 ms: stage 1: no memory",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"]
