"""A machine without a CUDA toolkit: compilers only where a test puts them."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from sgl_pipeline.pp_runner.flashinfer import toolkit

# What FlashInfer or its set-up reads.
_VARIABLES = "CUDA_HOME CUDA_PATH CXX CC FLASHINFER_USE_CUDA_NORM FLASHINFER_DISABLE_JIT".split()


class BareMachine:
    """Its `PATH` is one folder, its site-packages another, both empty at first."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tools = dict(os.environ)
        self.root = root
        self.commands = root / "bin"
        self.commands.mkdir()
        self.site_packages = root / "site-packages"
        self.site_packages.mkdir()
        self.no_toolkit = root / "usr-local-cuda"
        for name in _VARIABLES:
            monkeypatch.setenv(
                name, ""
            )  # so that it is put back, whatever the code under test does
            monkeypatch.delenv(name)
        monkeypatch.setenv("PATH", str(self.commands))
        monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(root))
        monkeypatch.setattr(sys, "path", [str(self.site_packages), *sys.path])
        # Not pip's own name for it: the environment of the tests may have those wheels.
        self._wheels = Path("nvidia") / "cuda-of-the-tests"
        monkeypatch.setattr(toolkit, "_PIP_TOOLKIT", self._wheels)

    @property
    def cache(self) -> Path:
        return self.root / ".cache" / "sgl_pipeline"

    def add_command(self, name: str, script: str = "exit 0") -> None:
        path = self.commands / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)

    def add_compiler(self) -> None:
        """The real C++ compiler, which finds its assembler and linker where they are."""
        path = self._tools["PATH"]
        real = shutil.which("c++", path=path)
        assert real is not None
        for name in ("c++", "gcc"):
            self.add_command(name, f'PATH={shlex.quote(path)} exec {shlex.quote(real)} "$@"')

    def add_wheels(self) -> Path:
        """What pip installs of a CUDA 13 toolkit, empty but for the versions."""
        return make_toolkit(self.site_packages / self._wheels, library="libcudart.so.13")


def make_toolkit(root: Path, version: int = 13000, library: str = "libcudart.so") -> Path:
    """A toolkit of files without content, in the layout of NVIDIA's, at `root`."""
    for path in ("bin/nvcc", "include/cublasLt.h", "nvvm/bin/cicc", f"lib/{library}"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch(mode=0o700)
    (root / "include" / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    return root
