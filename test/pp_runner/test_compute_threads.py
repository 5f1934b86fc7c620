"""The compute threads of a stage, each on a core of its own, as Linux says."""

import json
import os
import subprocess
import sys

import pytest
from support.assignments import tiny_assignment
from support.instruction_sets import kernels_for

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner import cost_measurement, kernel_choice, stage_loading
from sgl_pipeline.pp_runner.kernel_choice import BackendChoice, bind_compute_threads
from sgl_pipeline.stage_costs import TYPICAL_STEP

# In a process of its own, whose threads no other test uses. Prints the cores of each thread, this
# one first, after a sum that torch has computed with all compute threads, and when they are bound.
_PROGRAM = """
import json, os, sys
import torch
from sgl_pipeline.pp_runner.device import pin_threads
from sgl_pipeline.pp_runner.kernel_choice import BackendChoice, bind_compute_threads

def cores_of_threads():
    threads = sorted(int(name) for name in os.listdir("/proc/self/task"))
    return [sorted(os.sched_getaffinity(thread)) for thread in threads]

choice, num_threads, cores = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
pin_threads(num_threads, cores)
torch.ones(2**20).add(1)
before = cores_of_threads()
bind_compute_threads(BackendChoice(choice), num_threads, cores)
print(json.dumps([before, cores_of_threads()]))
"""
Cores = list[int]
ALL: Cores = sorted(os.sched_getaffinity(0))[:2]
needs_two_cores = pytest.mark.skipif(len(ALL) < 2, reason="needs two cores")


def cores_before_and_after(choice: str, num_threads: int) -> tuple[list[Cores], list[Cores]]:
    words = [sys.executable, "-c", _PROGRAM, choice, str(num_threads), json.dumps(ALL)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    before, after = json.loads(result.stdout)
    return before, after


@pytest.mark.compiler
@needs_two_cores
def test_each_compute_thread_stays_on_a_core_of_its_own() -> None:
    first, second = ALL
    before, after = cores_before_and_after("cpu", 2)
    assert before[0] == ALL and [second] not in before
    assert after[0] == [first] and after.count([second]) == 1
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 2


@pytest.mark.compiler
@needs_two_cores
@pytest.mark.parametrize(("choice", "num_threads"), [("cpu", 1), ("torch", 2)])
def test_threads_with_more_cores_and_those_of_torch_are_left_alone(
    choice: str, num_threads: int
) -> None:
    before, after = cores_before_and_after(choice, num_threads)
    assert before == after and before[0] == ALL


@pytest.mark.compiler
@pytest.mark.parametrize("measured", [False, True])
def test_they_are_bound_before_a_stage_loads_and_before_it_is_measured(
    monkeypatch: pytest.MonkeyPatch, measured: bool
) -> None:
    """For what is measured to be what is served."""
    bound: list[object] = []
    module = cost_measurement if measured else stage_loading
    monkeypatch.setattr(module, "bind_compute_threads", lambda *arguments: bound.append(arguments))
    monkeypatch.setattr(cost_measurement, "pin_threads", lambda *arguments: None)
    assignment = tiny_assignment(0, 6, cpu_threads=2, cpu_cores=(4, 5))
    if measured:
        cost_measurement.measure_part_costs(assignment, [TYPICAL_STEP])
    else:
        stage_loading.load_stage(assignment)
    assert bound == [(BackendChoice("torch"), 2, (4, 5))]


@pytest.mark.compiler
def test_a_core_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        def bind_threads(self, cores: tuple[int, ...]) -> bool:
            return False

    monkeypatch.setattr(kernel_choice, "load_cpu_kernels", Refused)
    with pytest.raises(ConfigurationError, match=r"CPU cores \[3, 5\], one on each"):
        bind_compute_threads(BackendChoice("cpu"), 2, (3, 5))
    # A core that no machine has: the system itself refuses, and this thread stays where it is.
    assert not kernels_for("native").bind_threads([1000])
