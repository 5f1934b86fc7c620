"""Devices by name, on a machine without a GPU."""

from pathlib import Path

import pytest
import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.device import open_device

CPU = torch.device("cpu")


def test_devices_that_are_not_there_are_refused():
    assert open_device("cpu", 3) == CPU
    with pytest.raises(ConfigurationError, match="'tpu' is not supported"):
        open_device("tpu", 0)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="use --device cpu"):
            open_device("cuda", 0)


def test_only_these_files_and_the_leaves_know_of_cuda():
    package = Path(__file__).parents[2] / "sgl_pipeline" / "pp_runner"
    files = [path for room in (".", "model", "output") for path in (package / room).glob("*.py")]
    askers = [path.name for path in files if "torch.cuda." in path.read_text()]
    assert set(askers) <= {"device.py", "kernel_choice.py", "kv_capacity.py"}
