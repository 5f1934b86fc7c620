"""Waiting for a server or router that has been started."""

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from benchmark.support.engine import EngineFailure

START_TIMEOUT_S = 300.0
_POLL_INTERVAL_S = 0.5
_LOG_LINES_SHOWN = 20


class Process(Protocol):
    def poll(self) -> int | None:
        """The exit status; None while it runs."""


def wait_for_start(
    name: str, is_up: Callable[[], bool], processes: Sequence[Process], log_path: Path
) -> None:
    """Returns when `is_up()`.

    Raises EngineFailure with `name` and the end of the log where one of the processes has ended, or
    it is not up in START_TIMEOUT_S.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not is_up():
        ends = [status for one in processes if (status := one.poll()) is not None]
        if ends or time.monotonic() > deadline_s:
            lines = log_path.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
            what = f"ended with {ends[0]}" if ends else f"not up in {START_TIMEOUT_S} s"
            raise EngineFailure("\n".join([f"{name}: {what}; see {log_path}", *lines]))
        time.sleep(_POLL_INTERVAL_S)


def answers(base_url: str) -> bool:
    """True if a server answers clients at `base_url`."""
    try:
        with urllib.request.urlopen(f"{base_url}/v1/models", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
