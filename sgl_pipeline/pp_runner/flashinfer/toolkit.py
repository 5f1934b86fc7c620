"""Finds a CUDA toolkit for FlashInfer, which compiles its kernels on the user's machine.

Where the machine has none, pip's wheels serve: they hold the compiler and the headers, in a layout
that FlashInfer does not search and without the names that it links by. Links in the user's cache
make up for both. Must never hand out a folder that another user could have written to.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.cpu_kernels.build import find_compiler
from sgl_pipeline.user_cache import make_private

_CUDA_MAJOR = (
    13  # the version that the pinned torch was built with, and whose runtime library it loads
)
_SYSTEM_TOOLKIT = Path("/usr/local/cuda")
_PIP_TOOLKIT = Path("nvidia/cu13")  # in site-packages; the wheels of CUDA 13 share it
_COMPILE_SECONDS = 60


def find_toolkit(cache_directory: Path, system_toolkit: Path = _SYSTEM_TOOLKIT) -> Path:
    """Returns the root of the CUDA toolkit to compile with, which is to be set as `CUDA_HOME`.

    The search is FlashInfer's: `CUDA_HOME`, `CUDA_PATH`, nvcc on `PATH`, `system_toolkit`; of the
    last two only a toolkit that is whole and of CUDA 13. Then pip's wheels, as a folder of links
    made in `cache_directory` unless it is there already; several processes may ask at once.

    Raises ConfigurationError when there is no toolkit, or none can be put together.
    """
    if named := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(named)
    on_path = shutil.which("nvcc")
    roots = [Path(on_path).parent.parent] if on_path else []
    roots.append(system_toolkit)
    reasons = []
    for root in roots:
        reason = _why_unfit(root)
        if reason is None:
            return root
        reasons.append(reason)
    wheels = pip_toolkit()
    if wheels is None:
        raise ConfigurationError(
            f"no CUDA {_CUDA_MAJOR} toolkit with nvcc ({', '.join(reasons)}, and pip has "
            "not installed nvidia-cuda-nvcc); set CUDA_HOME to one, or install "
            "requirements/cuda.txt"
        )
    try:
        return linked_toolkit(wheels, cache_directory)
    except OSError as error:
        raise ConfigurationError(
            f"the links to pip's CUDA toolkit cannot be made: {error}; set CUDA_HOME, or point "
            "FLASHINFER_WORKSPACE_BASE elsewhere"
        ) from error


def _why_unfit(root: Path) -> str | None:
    """The reason why FlashInfer's kernels cannot be compiled with the toolkit of `root`, or None.

    A found nvcc is not yet a toolkit: it may be a wrapper, and images with CUDA's runtime have the
    folder without a compiler.
    """
    # cublasLt.h is included by the norm kernels; not every toolkit has cuBLAS.
    for needed in ("bin/nvcc", "include/cuda.h", "include/cublasLt.h"):
        if not (root / needed).is_file():
            return f"{root} lacks {needed}"
    version = re.search(r"#define CUDA_VERSION (\d+)", (root / "include/cuda.h").read_text())
    if version is None or int(version[1]) // 1000 != _CUDA_MAJOR:
        return f"{root} is not of CUDA {_CUDA_MAJOR}"
    return None


def pip_toolkit() -> Path | None:
    """The toolkit of pip's wheels, or None without them."""
    for entry in sys.path:
        folder = Path(entry or ".", _PIP_TOOLKIT).resolve()
        if (folder / "bin" / "nvcc").is_file():
            return folder
    return None


def linked_toolkit(wheels: Path, cache_directory: Path) -> Path:
    """The folder of links to `wheels` in `cache_directory`, named after the libraries that it links
    to, so that it stays right. Raises OSError when the links cannot be made."""
    make_private(cache_directory)  # compilers are run from it
    libraries = sorted((wheels / "lib").iterdir())
    hashed = hashlib.sha256("\0".join(map(str, libraries)).encode()).hexdigest()
    toolkit = cache_directory / f"cuda-toolkit-{hashed[:24]}"
    if toolkit.is_dir():
        return toolkit
    with tempfile.TemporaryDirectory(dir=cache_directory) as directory:
        built = Path(directory) / toolkit.name
        _make_links(wheels, libraries, built)
        try:
            built.rename(toolkit)  # the folder is there whole or not at all
        except OSError:
            if not toolkit.is_dir():
                raise
            # Another process was first; its links are the same.
    return toolkit


def _make_links(wheels: Path, libraries: list[Path], toolkit: Path) -> None:
    """Lays `toolkit` out as an installed one: `lib64`, unversioned names, a stub of the driver."""
    stubs = toolkit / "lib" / "stubs"
    stubs.mkdir(parents=True)
    for name in ("bin", "include", "nvvm"):
        (toolkit / name).symlink_to(wheels / name)
    (toolkit / "lib64").symlink_to("lib")
    for library in libraries:
        (toolkit / "lib" / library.name).symlink_to(library)
    for library in libraries:
        if versioned := re.fullmatch(r"(lib.+\.so)\.\d+", library.name):
            unversioned = toolkit / "lib" / versioned[1]
            if not unversioned.exists():
                unversioned.symlink_to(library)
    _compile_stub(stubs / "libcuda.so")


def _compile_stub(library: Path) -> None:
    """Makes an empty library to link to as the driver's. No kernel that we use calls the driver;
    one that did would load it by this name."""
    command = [*find_compiler(), "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c++", os.devnull]
    try:
        subprocess.run(
            [*command, "-o", str(library)],
            capture_output=True,
            timeout=_COMPILE_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as error:
        message = error.stderr.decode(errors="replace").strip()
        raise ConfigurationError(f"{command[0]} cannot link a library: {message}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{command[0]} could not run: {error}") from error
