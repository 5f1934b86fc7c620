"""What a server's processes and its clients take of the cores."""

import subprocess
import sys
import time

import psutil
import pytest

from sgl_pipeline.capacity.processor_use import ProcessorMeter, ProcessorUse
from sgl_pipeline.capacity.rate_trial import RateTrial, Round
from sgl_pipeline.capacity.result import RateRow
from sgl_pipeline.goodput import LatencyTarget, RequestLatency

BUSY_S = 0.2
# Computes for BUSY_S in a child that is called a stage's process, then waits to be ended.
SERVER = """
import subprocess, sys
child = "import time; end = time.process_time() + %f\\nwhile time.process_time() < end: pass\\n"
child += "print(flush=True); input()"
code = [sys.executable, "-c", child, "stage_process"]
stage = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
input()
print(stage.stdout.readline().decode(), end="", flush=True)
input()
stage.communicate(b"")
"""


@pytest.mark.multiproc
def test_time_counts_for_the_kind_of_process_that_took_it() -> None:
    command = [sys.executable, "-c", SERVER % BUSY_S]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        meter = ProcessorMeter(server.pid)
        server.stdin.write(b"\n")
        server.stdin.flush()
        server.stdout.readline()
        end_s = time.process_time() + BUSY_S
        while time.process_time() < end_s:
            pass
        used = meter.used()
        server.communicate(b"\n")
    assert used.seconds["stages"] == pytest.approx(BUSY_S, abs=0.1)
    assert used.seconds["clients"] >= BUSY_S - 0.02
    assert used.seconds["front"] < BUSY_S
    assert used.cores["stages"] == pytest.approx(used.seconds["stages"] / used.duration_s)


@pytest.mark.multiproc
def test_a_server_that_has_ended_is_told() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as server:
        pass
    with pytest.raises(psutil.NoSuchProcess):
        ProcessorMeter(server.pid)


def test_rounds_of_a_rate_are_summed_and_the_two_parts_of_goodput_told_apart() -> None:
    uses = [ProcessorUse(2.0, {"front": 1.0}), ProcessorUse(6.0, {"front": 2.0, "others": 1.0})]
    latencies = (RequestLatency(10.0, 9.0), RequestLatency(99.0, 1.0), None)
    trial = RateTrial(1.0, tuple(Round(latencies, 1.0, one) for one in uses))
    row = RateRow.of(trial, LatencyTarget(ttft_ms=50.0, tpot_ms=5.0))
    assert row.processors == ProcessorUse(8.0, {"front": 3.0, "others": 1.0})
    assert row.processors.cores == {"front": 0.375, "others": 0.125}
    assert (row.goodput, row.ttft_share, row.tpot_share) == pytest.approx((0.0, 1 / 3, 1 / 3))
    simulated = RateTrial(1.0, (Round(latencies, 1.0),))
    assert RateRow.of(simulated, LatencyTarget()).processors is None
