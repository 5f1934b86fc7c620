"""The start's line on a terminal has every stage that has spoken."""

import io

import pytest

from sgl_pipeline.managers.stages.load_line import LoadLine
from sgl_pipeline.status_line import StatusLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_has_the_layers_of_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    line = LoadLine(16, StatusLine(terminal, interval_s=0.0))
    line.heard(1, 2)
    line.heard(0, 4)
    line.heard(1, 6)
    line.close()
    *_, last, closed = terminal.getvalue().split("\r\x1b[K")
    assert last == "loading weights [###############.........] 10 of 16 layers (stage 0: 4, 1: 6)"
    assert closed == ""
