"""One line of a terminal, rewritten to show progress.

Writes nothing if standard error is not a terminal: the line does not belong in a log.
"""

import shutil
import sys
import time
from typing import TextIO

_ERASE = "\r\x1b[K"
_BAR_WIDTH = 24


class StatusLine:
    """The line on `stream`, standard error by default, written every `interval_s` at most."""

    def __init__(self, stream: TextIO | None = None, interval_s: float = 0.1) -> None:
        self._stream = stream or sys.stderr
        self._interval_s = interval_s
        self._is_on = self._stream.isatty()
        self._shown_s: float | None = None

    def show(self, text: str) -> None:
        """Writes `text` in the place of what was there, cut to the terminal's width."""
        now_s = time.monotonic()
        is_early = self._shown_s is not None and now_s - self._shown_s < self._interval_s
        if self._is_on and not is_early:
            self._shown_s = now_s
            columns = shutil.get_terminal_size().columns
            self._stream.write(_ERASE + text[: columns - 1])
            self._stream.flush()

    def clear(self) -> None:
        """Leaves the line empty for the next output."""
        if self._is_on and self._shown_s is not None:
            self._shown_s = None
            self._stream.write(_ERASE)
            self._stream.flush()


def bar(done: int, total: int) -> str:
    """The share of `total` that is done, as a bar and in numbers."""
    filled = _BAR_WIDTH * min(done, total) // max(total, 1)
    return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {done} of {total}"
