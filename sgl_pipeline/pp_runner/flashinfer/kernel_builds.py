"""Lets FlashInfer compile its kernels on this machine, or explains in one line why it cannot.

Wrapped around FlashInfer's import and the first call of each kernel: that is when a kernel is
compiled, for minutes in all; afterwards it is in the user's cache.
"""

import importlib.util
import os
import re
import shlex
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.flashinfer.compile_notice import CompileNotice
from sgl_pipeline.pp_runner.flashinfer.toolkit import find_toolkit
from sgl_pipeline.user_cache import user_cache_directory

_WITHOUT_FLASHINFER = "--stage-attention-backend torch --stage-kernels torch"
_MOST_CHARACTERS = 300  # of a compiler's message
_notice = CompileNotice()


@contextmanager
def building_kernels() -> Iterator[None]:
    """Prepares this process's environment for FlashInfer, and explains errors of the code inside.
    If that compiles, one line on stderr announces it.

    Raises ConfigurationError, one line, when a compiler is missing, or when FlashInfer cannot be
    imported or cannot compile, load or run a kernel.
    """
    try:
        _prepare_environment()
    except ConfigurationError as error:
        raise _cannot_build(str(error)) from error
    try:
        with _notice.watching():
            yield
    except ImportError as error:
        raise _cannot_build(f"{error}; install requirements/cuda.txt") from error
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError) as error:
        raise _cannot_build(_line_of(str(error)) or type(error).__name__) from error


def _prepare_environment() -> None:
    """Sets the variables that FlashInfer reads when it is imported or first compiles."""
    # Without it the norm's kernel depends on whether nvidia-cutlass-dsl happens to be installed,
    # and the kernel that was tested is not the one that serves.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    if os.environ.get("FLASHINFER_DISABLE_JIT") or _has_module("flashinfer_jit_cache"):
        return  # its kernels are there already
    _require_compiler()
    _put_ninja_on_path()
    os.environ["CUDA_HOME"] = str(find_toolkit(_cache_directory()))


def _require_compiler() -> None:
    """FlashInfer links with `$CXX` or c++, and nvcc hands host code to `$CC` or gcc."""
    for variable, default in (("CXX", "c++"), ("CC", "gcc")):
        command = shlex.split(os.environ.get(variable, "")) or [default]
        if shutil.which(command[0]) is None:
            raise ConfigurationError(f"no C++ compiler was found ({command[0]}); install g++")


def _put_ninja_on_path() -> None:
    """pip puts ninja beside the interpreter, a folder that `PATH` has only in an activated
    environment."""
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None:
        if shutil.which("ninja", path=scripts) is None:
            raise ConfigurationError("ninja was not found; install it (pip install ninja)")
        os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH"), scripts)))


def _cache_directory() -> Path:
    """Beside FlashInfer's own cache where its variable moves that, else beside our kernels."""
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE")
    return Path(base, ".cache", "sgl_pipeline") if base else user_cache_directory()


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _cannot_build(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"FlashInfer cannot be used: {reason.rstrip('.')}, or choose {_WITHOUT_FLASHINFER}"
    )


def _line_of(message: str) -> str:
    """The first line that names an error, of a message that may hold a compiler's whole output."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"(?i)(?<![\w-])error\b|no such file", line)]
    return next(iter(named or lines), "")[:_MOST_CHARACTERS]
