"""The stand-in operators come only where torchvision's own cannot load.

torch ends the process when an operator is defined twice, so each case is a process of its own: a
fork of one that has imported torch.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_pipeline.managers.torchvision_hook import write_path_file
from sgl_pipeline.pp_runner.cpu_kernels.build import find_compiler

# Imports torch once; then each folder that it reads has a fork, which says whether the shim stands
# in, and whether there is an operator then.
SHIM = """
import os, sys
import torch
from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

for line in sys.stdin:
    sys.stdout.flush()
    if os.fork() == 0:
        sys.path.insert(0, line.strip())
        print(install_torchvision_shim(), hasattr(torch.ops.torchvision, "nms"), flush=True)
        os._exit(0)
    _, status = os.wait()
    if status:
        print("failed", status, flush=True)
"""


@pytest.fixture(scope="module")
def shim() -> Iterator[subprocess.Popen[str]]:
    """A process of `SHIM`."""
    with subprocess.Popen(
        [sys.executable, "-c", SHIM],
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def after_the_shim(shim: subprocess.Popen[str], site_packages: Path) -> list[str]:
    """Whether the shim says that it stands in, and whether there is an operator then."""
    assert shim.stdin is not None and shim.stdout is not None
    shim.stdin.write(f"{site_packages}\n")
    return shim.stdout.readline().split()


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
def test_operators_that_load_are_left_alone(
    shim: subprocess.Popen[str], package: Path, name: str
) -> None:
    command = [*find_compiler(), "-shared", "-x", "c++", os.devnull, "-o", package / f"{name}.so"]
    subprocess.run(command, check=True)
    assert after_the_shim(shim, package.parent) == ["False", "False"]


@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["_C", "_C_stable"])
def test_operators_that_cannot_load_are_stood_in_for(
    shim: subprocess.Popen[str], package: Path, name: str
) -> None:
    (package / f"{name}.so").write_text("built for another torch")
    assert after_the_shim(shim, package.parent) == ["True", "True"]


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
