"""The memory of a process tree, against processes that hold a known amount."""

import subprocess
import sys

import psutil
import pytest

from benchmark.support.memory import tree_pss_mib

HELD_MIB = 64
PARENT = f"""
import subprocess, sys
held = bytearray(b"x") * ({HELD_MIB} << 20)
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
child.wait()
"""
CHILD = f"""
import sys
held = bytearray(b"x") * ({HELD_MIB} << 20)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.multiproc
def test_the_memory_of_a_server_is_that_of_its_children_too() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        total_mib = tree_pss_mib(psutil.Process(parent.pid))
        (child,) = psutil.Process(parent.pid).children()
        assert tree_pss_mib(child) >= HELD_MIB
        parent.communicate("")
    # Two interpreters take some MiB of their own.
    assert 2 * HELD_MIB <= total_mib < 3 * HELD_MIB
