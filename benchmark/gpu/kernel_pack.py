"""Packs FlashInfer and its compiled modules for a machine that can neither download nor compile.

Called by `build_kernels.py`. The pack is a folder for `PYTHONPATH`: FlashInfer without what only
compilation reads, its modules where it looks for prebuilt ones, and the packages that such a
machine lacks. Must not hand out a pack that does not load here.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tvm_ffi

from benchmark.gpu.kernel_modules import Build
from benchmark.gpu.kernel_wheels import CUDA_REQUIREMENTS, install_for_python, pins
from benchmark.gpu.packed_kernels import write_list
from sgl_pipeline.errors import ConfigurationError, KernelBuildError

PACKAGES = ("apache-tvm-ffi", "msgspec", "pyzmq")
# FlashInfer generates a module's sources before it looks for the prebuilt library.
_SOURCES = ("batch_decode*", "batch_prefill*")
_CHECK_SECONDS = 300


def write_pack(
    wheels: Path, toolkit: Path, builds: Sequence[Build], python_version: str, archive: Path
) -> str:
    """Writes `archive`, a .tar.xz, with what `builds` compiled and a list of it, after loading all
    of it here.

    Returns the names of the packages that FlashInfer imports and the pack does not hold.

    Args:
        wheels: where FlashInfer was installed for the compilation.
        python_version: of the machine that the pack is for, such as 3.12.

    Raises ConfigurationError when the modules were compiled against another tvm-ffi than is packed,
    KernelBuildError when the pack lacks something.
    """
    packed = pins(CUDA_REQUIREMENTS)["apache-tvm-ffi"]
    if tvm_ffi.__version__ != packed:
        raise ConfigurationError(
            f"the modules were compiled against apache-tvm-ffi {tvm_ffi.__version__}, and the pack "
            f"would hold {packed}; install that version and build again"
        )
    with tempfile.TemporaryDirectory(dir=archive.parent) as directory:
        site = Path(directory) / "site"
        _copy_flashinfer(wheels, site)
        for build in builds:
            library = site / "flashinfer/data/aot" / build.library_name / build.library.name
            library.parent.mkdir(parents=True)
            shutil.copyfile(build.library, library)
        imported = _check_loads(site, toolkit, [build.name for build in builds])
        write_list(site, {build.name: build.library_name for build in builds}, python_version)
        install_for_python(site, PACKAGES, python_version)
        _write_archive(site, archive)
    return imported


def _copy_flashinfer(wheels: Path, site: Path) -> None:
    """Its Python, its licenses and the templates of the attention modules."""
    data = wheels / "flashinfer" / "data"

    def left_out(folder: str, names: list[str]) -> set[str]:
        if Path(folder) == wheels / "flashinfer":
            return {"data", "__pycache__"}
        files = {name for name in names if (Path(folder) / name).is_file()}
        return {name for name in files if not name.endswith(".py")} | {"__pycache__"}

    shutil.copytree(wheels / "flashinfer", site / "flashinfer", ignore=left_out)
    sources = site / "flashinfer" / "data" / "csrc"
    sources.mkdir(parents=True)
    for pattern in _SOURCES:
        for path in (data / "csrc").glob(pattern):
            shutil.copyfile(path, sources / path.name)
    for information in wheels.glob("flashinfer_python-*.dist-info"):
        shutil.copytree(information, site / information.name)


_LOAD = """
import ctypes, os, sys
from pathlib import Path
from benchmark.gpu.kernel_modules import module_makers

site, libraries, *names = sys.argv[1:]
import flashinfer

assert Path(flashinfer.__file__).is_relative_to(site), flashinfer.__file__
ctypes.CDLL(f"{libraries}/stubs/libcuda.so")
ctypes.CDLL(f"{libraries}/libcudart.so.13")
makers = module_makers()
for name in names:
    makers[name]().build_and_load()
ours = {"benchmark", "sgl_pipeline", "flashinfer", "tvm_ffi", *sys.stdlib_module_names}
packages = {name for name in sys.modules if "." not in name and not name.startswith("_")}
print(*sorted(packages - ours))
"""


def _check_loads(site: Path, toolkit: Path, names: Sequence[str]) -> str:
    """Loads the packed modules in a process that cannot compile, with this Python's tvm-ffi.

    Returns the names of the packages that were imported from outside the pack, with spaces between.
    """
    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(site), *filter(None, sys.path))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "FLASHINFER_DISABLE_JIT": "1",
            "FLASHINFER_WORKSPACE_BASE": scratch,
            "CUDA_HOME": scratch,
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, str(site), str(toolkit / "lib64"), *names],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_CHECK_SECONDS,
        )
    if done.returncode != 0:
        raise KernelBuildError(f"the pack does not load:\n{done.stderr.strip()}")
    return done.stdout.strip()


def _write_archive(site: Path, archive: Path) -> None:
    """Writes it beside and renames it, so that it is there whole or not at all."""
    partial = archive.with_name(f"{archive.name}.partial")
    with tarfile.open(partial, "w:xz", preset=9) as packed:
        packed.add(site, arcname=".", filter=_without_caches)
    partial.replace(archive)


def _without_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name else member
