"""What upstream's watchdog of children says when the server ends, and when one crashes."""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sglang.srt.utils.watchdog import SubprocessWatchdog

from sgl_pipeline.managers.hosts.head_client import HeadProcess
from sgl_pipeline.managers.server_end import end_children
from sgl_pipeline.managers.stages.stage_processes import StageProcesses

pytestmark = pytest.mark.multiproc
LOOK_INTERVAL_S = 0.01


@pytest.fixture
def quits() -> Iterator[threading.Event]:
    """Set by a SIGQUIT; what the end of a server changes in a process is put back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    quit_seen = threading.Event()
    signal.signal(signal.SIGQUIT, lambda *_: quit_seen.set())
    yield quit_seen
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    logging.getLogger(SubprocessWatchdog.__module__).disabled = False


def watched_child() -> tuple[ForkProcess, SubprocessWatchdog]:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    watchdog = SubprocessWatchdog([child], ["scheduler_0"], LOOK_INTERVAL_S)
    watchdog.start()
    return child, watchdog


def wait_for_the_last_look(watchdog: SubprocessWatchdog) -> None:
    """It looks until it has seen a child that ended with an error."""
    thread = watchdog._thread
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


def test_what_the_servers_end_kills_is_not_reported_as_a_crash(
    quits: threading.Event, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    child, watchdog = watched_child()
    end_children(StageProcesses(os.fspath(tmp_path)), HeadProcess())
    assert child.exitcode == -signal.SIGKILL
    wait_for_the_last_look(watchdog)
    assert caplog.text == ""
    assert not quits.is_set()


def test_a_child_that_crashes_while_the_server_runs_is_reported(
    quits: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    child, watchdog = watched_child()
    child.kill()
    child.join()
    wait_for_the_last_look(watchdog)
    assert "Subprocess scheduler_0" in caplog.text and "exit code -9" in caplog.text
    assert quits.wait(60)
