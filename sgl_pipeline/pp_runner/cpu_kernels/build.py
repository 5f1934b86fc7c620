"""Compiles C++ sources once for this machine and keeps the library in the user's cache.

Several stages may call at once when they start. Must never hand out a library that another user
could have written, or one built for another CPU or compiler.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sgl_pipeline.errors import KernelBuildError
from sgl_pipeline.user_cache import make_private

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_COMPILE_SECONDS = 300


def find_compiler() -> list[str]:
    """The C++ compiler of the machine as a command: `$CXX`, c++, g++ or clang++."""
    configured = shlex.split(os.environ.get("CXX", ""))
    for command in [configured] if configured else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    wanted = f"CXX={shlex.join(configured)}" if configured else "c++, g++ or clang++"
    raise KernelBuildError(f"no C++ compiler ({wanted}); install one or set CXX")


def build_library(
    name: str,
    sources: Sequence[Path],
    headers: Sequence[Path],
    compiler: Sequence[str],
    cache_directory: Path,
) -> Path:
    """The shared library `name` of `sources`, compiled now unless the cache holds it.

    Its name has a hash of the sources, our headers that they include, the flags and the compiler's
    predefined macros, which contain its version and the instruction sets of -march=native here.

    Raises KernelBuildError when the compiler fails or the cache cannot be trusted or written.
    """
    macros = _run([*compiler, *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull])
    hashed = hashlib.sha256()
    texts = [path.read_bytes() for path in (*sources, *headers)]
    for part in (*texts, shlex.join([*compiler, *_FLAGS]).encode(), macros):
        hashed.update(hashlib.sha256(part).digest())
    try:
        make_private(cache_directory)  # code is loaded from it
        library = cache_directory / f"{name}-{hashed.hexdigest()[:24]}.so"
        # A second caller waits for the first one's library instead of compiling it again.
        with open(cache_directory / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                print(
                    f"sgl_pipeline: compiling {name} for this machine's CPU, once ...",
                    file=sys.stderr,
                    flush=True,
                )
                _compile(sources, compiler, library)
    except OSError as error:
        raise KernelBuildError(
            f"the cache of compiled kernels cannot be used: {error}; point XDG_CACHE_HOME elsewhere"
        ) from error
    return library


def _compile(sources: Sequence[Path], compiler: Sequence[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        built = Path(directory) / library.name
        _run([*compiler, *_FLAGS, *map(str, sources), "-o", str(built)])
        os.replace(built, library)  # a library is there whole or not at all


def _run(command: list[str]) -> bytes:
    """Runs the compiler and returns what it printed."""
    try:
        finished = subprocess.run(
            command,
            capture_output=True,
            timeout=_COMPILE_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as error:
        message = error.stderr.decode(errors="replace").strip()
        raise KernelBuildError(f"`{shlex.join(command)}` failed:\n{message[-2000:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"`{shlex.join(command)}` could not run: {error}") from error
    return finished.stdout
