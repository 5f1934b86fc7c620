import os
import signal
import subprocess
import sys

import pytest

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
