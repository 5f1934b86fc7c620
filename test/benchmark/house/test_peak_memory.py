"""The most memory that a tree of processes holds at once."""

import sys

import pytest

from benchmark.house.peak_memory import MIB, Holding, main, report

# Its child holds 200 MiB for a moment, after the parent has given 100 MiB back.
TREE = """
import subprocess, sys, time
block = bytearray(100 << 20); time.sleep(0.7); del block
hold = "import time; block = bytearray(200 << 20); time.sleep(1.5)"
subprocess.run([sys.executable, "-c", hold], check=True)
sys.exit(3)
"""


@pytest.mark.multiproc
def test_the_peak_is_that_of_the_whole_tree_and_the_exit_code_stays(capsys):
    assert main([sys.executable, "-c", TREE]) == 3
    peak_mib = int(capsys.readouterr().out.split()[1])
    assert 200 <= peak_mib < 300


def test_the_largest_processes_are_named():
    text = report([Holding(2 * MIB, "python a"), Holding(MIB, "python b")], 1.0, 2.0)
    assert text.splitlines() == [
        "peak 3 MiB in 2 processes, 1 s after the start of 2 s",
        "       2 MiB  python a",
        "       1 MiB  python b",
    ]


def test_a_command_must_be_named(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "name the command" in capsys.readouterr().err
