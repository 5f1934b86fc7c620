"""The stand-in operators come only where torchvision's own cannot load.

torch ends the process when an operator is defined twice, so each case is a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_pipeline.managers.torchvision_hook import write_path_file
from sgl_pipeline.pp_runner.cpu_kernels.build import find_compiler

SHIM = """
import torch
from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim
print(install_torchvision_shim(), hasattr(torch.ops.torchvision, "nms"))
"""


def after_the_shim(site_packages: Path) -> list[str]:
    """Whether the shim says that it stands in, and whether there is an operator then."""
    done = subprocess.run(
        [sys.executable, "-c", SHIM],
        env=os.environ | {"PYTHONPATH": f"{site_packages}:{Path.cwd()}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A torchvision without an extension."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    return package


@pytest.mark.multiproc
@pytest.mark.compiler
@pytest.mark.parametrize("name", ["_C", "_C_stable"])
def test_operators_that_load_are_left_alone(package: Path, name: str) -> None:
    command = [*find_compiler(), "-shared", "-x", "c++", os.devnull, "-o", package / f"{name}.so"]
    subprocess.run(command, check=True)
    assert after_the_shim(package.parent) == ["False", "False"]


@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["_C", "_C_stable"])
def test_operators_that_cannot_load_are_stood_in_for(package: Path, name: str) -> None:
    (package / f"{name}.so").write_text("built for another torch")
    assert after_the_shim(package.parent) == ["True", "True"]


@pytest.mark.multiproc
def test_every_python_of_an_environment_gets_the_shim_before_torchvision(package: Path) -> None:
    (package / "_C.so").write_text("built for another torch")
    (package / "__init__.py").write_text(
        "import torch; print(hasattr(torch.ops.torchvision, 'nms'))"
    )
    write_path_file(package.parent)
    script = f"""
import site, sys
sys.modules.pop("sgl_pipeline", None)
sys.path.insert(0, {str(package.parent)!r})
site.addsitedir({str(package.parent)!r})
print("torch" in sys.modules, "sgl_pipeline" in sys.modules)
import torchvision
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path.cwd(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False", "True"]
