import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import sgl_pipeline
from sgl_pipeline.process_lifetime import WatchedProcess, child_environment

# A parent that starts a child, which says its pid once it is bound to the parent's life.
PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""
CHILD = """
import os, sys, time
from sgl_pipeline.process_lifetime import die_with_parent
die_with_parent()
print(os.getpid(), flush=True)
time.sleep(600)
"""
ORPHAN = """
from sgl_pipeline.process_lifetime import die_with_parent
die_with_parent(parent_pid=1 << 30)
print("still here")
"""


@pytest.mark.multiproc
def test_a_child_ends_when_its_parent_is_killed_and_not_by_ctrl_c() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    os.kill(child_pid, signal.SIGINT)
    os.kill(child_pid, 0)
    parent.kill()
    # The child holds the other end of the pipe: it ends when the child does.
    assert parent.stdout.read() == ""
    parent.wait()


@pytest.mark.multiproc
def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    result = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (1, "")


# Starts a child that does as it is told, says its pid, and leaves it unwaited for.
GRANDPARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os._exit(3)", "its process ended, exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "its process ended, killed by signal 9"),
    ],
)
def test_the_end_of_a_process_that_is_no_child_is_noticed_and_named(code: str, words: str) -> None:
    with grandchild(code) as pid:
        watched = WatchedProcess(pid)
        assert watched.wait(timeout_s=30)
        assert watched.end() == words
        watched.kill()  # does no harm
        watched.close()


@pytest.mark.multiproc
def test_a_process_that_is_no_child_can_be_ended() -> None:
    with grandchild("import time; time.sleep(600)") as pid:
        watched = WatchedProcess(pid)
        assert not watched.wait()
        watched.kill()
        assert watched.wait(timeout_s=30)
        assert watched.end() == "its process ended, killed by signal 9"
        watched.close()


@contextmanager
def grandchild(code: str) -> Iterator[int]:
    """The process id of a process that runs `code`."""
    parent = subprocess.Popen(
        [sys.executable, "-c", GRANDPARENT, code], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        yield int(parent.stdout.readline())
        parent.kill()


@pytest.mark.multiproc
def test_threads_that_have_no_core_have_waited() -> None:
    """Two threads of one process on one core: each waits for the other."""
    code = (
        "import os, threading, time\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "def spin():\n"
        "    while True: pass\n"
        "threading.Thread(target=spin, daemon=True).start()\n"
        "spin()\n"
    )
    asleep = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    spinning = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    try:
        watched = WatchedProcess(spinning[0].pid)
        deadline_s = time.monotonic() + 20.0
        while time.monotonic() < deadline_s:
            waits_s = watched.core_waits_s()
            if len(waits_s) == 2 and max(waits_s.values()) > 0.3:
                break
            time.sleep(0.05)
        waits_s = watched.core_waits_s()
        assert len(waits_s) == 2 and max(waits_s.values()) > 0.3
        assert sum(WatchedProcess(asleep.pid).core_waits_s().values()) < sum(waits_s.values())
    finally:
        for process in (asleep, *spinning):
            process.kill()
            process.wait()
    assert watched.core_waits_s() == {}


def test_a_child_environment_has_this_package_first(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(sgl_pipeline.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    environment = child_environment(OMP_NUM_THREADS="1")
    assert environment["PYTHONPATH"] == f"{root}{os.pathsep}/elsewhere"
    assert environment["PYTHONSAFEPATH"] == "1"  # nothing from where it starts
    assert environment["OMP_NUM_THREADS"] == "1" and environment["HOME"] == os.environ["HOME"]
    monkeypatch.delenv("PYTHONPATH")
    assert child_environment()["PYTHONPATH"] == root
