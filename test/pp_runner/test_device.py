"""Devices by name and pinning, on a machine without a GPU."""

import os
from pathlib import Path

import pytest
import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.device import open_device, pin_threads

CPU = torch.device("cpu")


def test_devices_that_are_not_there_are_refused():
    assert open_device("cpu", 3) == CPU
    with pytest.raises(ConfigurationError, match="'tpu' is not supported"):
        open_device("tpu", 0)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="use --device cpu"):
            open_device("cuda", 0)


def test_a_core_that_is_not_there_is_named():
    with pytest.raises(ConfigurationError, match="9999"):
        pin_threads(1, (9999,))


def test_threads_and_cores_are_set():
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        pin_threads(1, (min(cores),))
        assert os.sched_getaffinity(0) == {min(cores)}
        assert torch.get_num_threads() == 1
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def test_only_these_files_and_the_leaves_know_of_cuda():
    package = Path(__file__).parents[2] / "sgl_pipeline" / "pp_runner"
    files = [path for room in (".", "model", "output") for path in (package / room).glob("*.py")]
    askers = [path.name for path in files if "torch.cuda." in path.read_text()]
    assert set(askers) <= {"device.py", "kernel_choice.py", "kv_capacity.py"}
