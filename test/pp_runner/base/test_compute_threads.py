"""The cores of a stage, and its compute threads on one of their own each, as Linux says."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from support.assignments import tiny_assignment
from support.instruction_sets import kernels_for
from support.tiny_models import tiny_model

from sgl_pipeline.costs.stage_costs import TYPICAL_STEP
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner import cost_measurement, stage_loading
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.base import compute_threads
from sgl_pipeline.pp_runner.base.compute_threads import bind_compute_threads, pin_threads
from sgl_pipeline.pp_runner.cpu_kernels.library import load_cpu_kernels
from sgl_pipeline.pp_runner.kernel_choice import BackendChoice
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec

# In a process of its own, whose threads no other test uses. Prints the cores of each thread, this
# one first, after a sum that torch has computed with two threads, and after each binding; then
# those of a thread that is started now.
_PROGRAM = """
import json, os, sys, threading
import torch
from sgl_pipeline.pp_runner.base.compute_threads import (
    bind_compute_threads, pin_threads, use_every_core
)

def cores_of_threads():
    threads = sorted(int(name) for name in os.listdir("/proc/self/task"))
    return [sorted(os.sched_getaffinity(thread)) for thread in threads]

def start_another():
    use_every_core()
    seen.append([sorted(os.sched_getaffinity(0))])

name, dtype, bindings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
pin_threads(2, bindings[0])
torch.ones(2**20).add(1)
seen = [cores_of_threads()]
for cores in bindings:
    bind_compute_threads(name, getattr(torch, dtype), 2, cores)
    seen.append(cores_of_threads())
thread = threading.Thread(target=start_another)
thread.start()
thread.join()
print(json.dumps(seen))
"""
# The tokens of two stages with weights in FP8, whose threads are free and then bound; then the
# number of their compiled products with such weights, and the cores of each thread.
_FP8_STAGES = """
import gc, json, os, sys
import torch
from pathlib import Path
from support.local_pipeline import LocalPipeline
from sgl_pipeline.pp_runner.base.compute_threads import bind_compute_threads, pin_threads
from sgl_pipeline.pp_runner.layer_kernels.compiled_quantized import CompiledExpandedLinear
from sgl_pipeline.requests import GREEDY, Request, StopRules

model, cores, found = Path(sys.argv[1]), json.loads(sys.argv[2]), []
for places in ((), cores):
    pin_threads(2, places)
    bind_compute_threads("cpu", torch.bfloat16, 2, places)
    requests = [
        Request(str(size), list(range(1, size + 1)), GREEDY, StopRules(max_new_tokens=12))
        for size in (1, 7, 30)
    ]
    pipeline = LocalPipeline(
        model, (2, 4), quantization="fp8",
        dtype="bfloat16", attention_backend="cpu", layer_kernels="cpu",
    )
    pipeline.run(requests)
    found.append([list(request.output_ids) for request in requests])
products = sum(type(one) is CompiledExpandedLinear for one in gc.get_objects())
threads = sorted(int(name) for name in os.listdir("/proc/self/task"))
affinities = [sorted(os.sched_getaffinity(thread)) for thread in threads]
print(json.dumps([*found, products, affinities]))
"""
Cores = list[int]
ALL: Cores = sorted(os.sched_getaffinity(0))[:2]
needs_two_cores = pytest.mark.skipif(len(ALL) < 2, reason="needs two cores")


def test_a_core_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigurationError, match="9999"):
        pin_threads(1, (9999,))


def test_threads_and_cores_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_threads, "_cores", ())
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        pin_threads(1, (min(cores),))
        assert os.sched_getaffinity(0) == {min(cores)}
        assert torch.get_num_threads() == 1
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def cores_of_threads(name: str, dtype: str, *bound_to: Cores) -> list[list[Cores]]:
    words = [sys.executable, "-c", _PROGRAM, name, dtype, json.dumps(bound_to)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    seen: list[list[Cores]] = json.loads(result.stdout)
    return seen


@pytest.mark.multiproc
@pytest.mark.compiler
@needs_two_cores
def test_stages_bound_to_cores_give_the_tokens_of_free_ones_with_weights_in_fp8() -> None:
    """And no product of theirs is torch's, which would end the threads that were bound."""
    if not load_cpu_kernels().has_products:
        pytest.skip("neither AVX2 nor bf16 instructions")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", _FP8_STAGES, str(tiny_model("qwen3")), json.dumps(ALL)]
    result = subprocess.run(
        words, capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    free, bound, products, cores = json.loads(result.stdout.splitlines()[-1])
    assert free == bound and all(free)
    assert products > 0
    assert [[core] for core in ALL] == sorted(one for one in cores if len(one) == 1)


@pytest.mark.multiproc
@pytest.mark.compiler
@needs_two_cores
def test_each_compute_thread_stays_on_a_core_of_its_own_and_others_may_use_all() -> None:
    """A stage that has another number of cores than threads leaves them free to move."""
    if not load_cpu_kernels().has_products:
        pytest.skip("no compiled products")
    first, second = ALL
    before, bound, freed, (another,) = cores_of_threads("cpu", "bfloat16", ALL, [first])
    assert before[0] == another == ALL
    assert bound[0] == freed[0] == [first]
    changed = [
        (one, other) for one, other in zip(before[1:], bound[1:], strict=True) if one != other
    ]
    assert [other for _, other in changed] == [[second]]
    assert freed[bound.index([second])] == [first]


@pytest.mark.multiproc
@pytest.mark.compiler
@needs_two_cores
@pytest.mark.parametrize(("name", "dtype"), [("torch", "bfloat16"), ("cpu", "float32")])
def test_threads_of_torchs_products_are_left_alone(name: str, dtype: str) -> None:
    before, after, (another,) = cores_of_threads(name, dtype, ALL)
    assert before == after and before[0] == another == ALL


class Recorder:
    """In the place of the compiled kernels: what was bound."""

    has_products = True

    def __init__(self, succeeds: bool = True) -> None:
        self.bound: list[tuple[int, Sequence[int]]] = []
        self._succeeds = succeeds

    def bind_threads(self, num_threads: int, cores: Sequence[int]) -> bool:
        self.bound.append((num_threads, cores))
        return self._succeeds


@pytest.mark.parametrize(
    ("name", "num_threads", "cores", "binds"),
    [
        ("cpu", 2, (3, 5), True),
        ("cpu", 2, (3, 4, 5), True),  # a stage may have had others, one of which is now not its own
        ("cpu", 1, (3,), False),
        ("cpu", 2, (), False),
        ("torch", 2, (3, 5), False),
    ],
)
def test_threads_are_bound_where_there_are_several_and_cores_for_them(
    monkeypatch: pytest.MonkeyPatch, name: str, num_threads: int, cores: Cores, binds: bool
) -> None:
    kernels = Recorder()
    monkeypatch.setattr(compute_threads, "load_cpu_kernels", lambda: kernels)
    bind_compute_threads(name, torch.bfloat16, num_threads, cores)
    assert kernels.bound == [(num_threads, cores)] * binds


@pytest.mark.parametrize("measured", [False, True])
def test_they_are_bound_before_a_stage_loads_and_before_it_is_measured(
    monkeypatch: pytest.MonkeyPatch, measured: bool
) -> None:
    """For what is measured to be what is served."""
    calls: list[object] = []
    module = cost_measurement if measured else stage_loading
    monkeypatch.setattr(module, "bind_compute_threads", lambda *what: calls.append(what))
    monkeypatch.setattr(cost_measurement, "pin_threads", lambda *what: None)
    make, call = module.make_layer_kernels, calls.append

    def making(choice: BackendChoice, shape: AttentionShape, spec: ModelSpec) -> LayerKernels:
        call("kernels")
        return make(choice, shape, spec)

    monkeypatch.setattr(module, "make_layer_kernels", making)
    assignment = tiny_assignment(0, 6, cpu_threads=2, cpu_cores=(4, 5))
    if measured:
        cost_measurement.measure_part_costs(assignment, [TYPICAL_STEP])
    else:
        stage_loading.load_stage(assignment)
    assert calls[:2] == [("torch", torch.float32, 2, (4, 5)), "kernels"]


def test_a_refusal_is_a_warning_that_names_the_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compute_threads, "load_cpu_kernels", lambda: Recorder(succeeds=False))
    bind_compute_threads("cpu", torch.bfloat16, 2, (3, 5))
    assert "CPU cores [3, 5], one on each" in caplog.text


@pytest.mark.compiler
def test_the_system_refuses_a_core_that_no_machine_has() -> None:
    assert not kernels_for("native").bind_threads(2, [1000, 1001])
