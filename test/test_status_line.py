"""A status line is for terminals alone."""

import io

import pytest

from sgl_pipeline.status_line import StatusLine, bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_written_where_there_is_no_terminal() -> None:
    log = io.StringIO()
    line = StatusLine(log)
    line.show("half of it")
    line.clear()
    assert log.getvalue() == ""


def test_a_terminal_has_one_line_that_is_empty_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "8")
    terminal = Terminal()
    line = StatusLine(terminal, interval_s=0.0)
    line.show("a third of it")
    line.show("all")
    line.clear()
    line.clear()
    assert terminal.getvalue().split("\r\x1b[K") == ["", "a third", "all", ""]


def test_it_is_not_written_more_often_than_wanted() -> None:
    terminal = Terminal()
    line = StatusLine(terminal, interval_s=1000.0)
    for number in range(10):
        line.show(str(number))
    assert terminal.getvalue() == "\r\x1b[K0"


@pytest.mark.parametrize(
    ("done", "total", "picture"),
    [
        (0, 32, "[........................] 0 of 32"),
        (16, 32, "[############............] 16 of 32"),
        (33, 32, "[########################] 33 of 32"),
        (0, 0, "[........................] 0 of 0"),
    ],
)
def test_a_bar_is_as_full_as_the_work_is_done(done: int, total: int, picture: str) -> None:
    assert bar(done, total) == picture
