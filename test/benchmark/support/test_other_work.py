"""Whose processor time it was."""

import os
import subprocess
import sys

import psutil
import pytest

from benchmark.support.other_work import ProcessorTimes


def test_what_is_neither_ours_nor_idle_is_others() -> None:
    before = ProcessorTimes(at_s=100.0, busy_s=50.0, ours_s=20.0)
    after = ProcessorTimes(at_s=110.0, busy_s=65.0, ours_s=30.0)
    # 15 s of the 20 s of two processors were busy, and 10 of these were ours.
    assert before.others_share(after, num_processors=2) == pytest.approx(0.25)


@pytest.mark.multiproc
def test_the_work_of_a_child_that_has_ended_is_ours() -> None:
    server = psutil.Process(os.getpid())
    before = ProcessorTimes.now(server)
    program = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", program], check=True)
    after = ProcessorTimes.now(server)
    # Times are sums of ticks of 10 ms, each rounded down.
    assert after.ours_s - before.ours_s > 0.25
