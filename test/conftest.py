"""What all tests need: transformers imports on a CPU, no test takes more than one core, and none
fails because the machine is busy."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from sgl_pipeline.errors import KernelBuildError
from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim
from sgl_pipeline.pp_runner.cpu_kernels.build import find_compiler

install_torchvision_shim()
torch.set_num_threads(1)
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A machine without a C++ compiler serves through the torch path, and is tested on it."""
    try:
        find_compiler()
    except KernelBuildError as error:
        for item in items:
            if item.get_closest_marker("compiler"):
                item.add_marker(pytest.mark.skip(reason=str(error)))
