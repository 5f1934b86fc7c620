"""The compiled kernels as machines with fewer instructions than this one have them."""

import os
import platform
import subprocess
from collections.abc import Sequence

import pytest

from sgl_pipeline.errors import KernelBuildError
from sgl_pipeline.pp_runner.cpu_kernels.build import find_compiler
from sgl_pipeline.pp_runner.cpu_kernels.library import CpuKernels, load_cpu_kernels

_WITHOUT_AMX = ("-mno-amx-bf16", "-mno-amx-tile")
_FORBIDDEN: dict[str, tuple[str, ...]] = {"native": ()}
if platform.machine() == "x86_64":
    _FORBIDDEN |= {
        "without AMX": _WITHOUT_AMX,
        "without AVX-512 BF16": ("-mno-avx512bf16", *_WITHOUT_AMX),  # Skylake-X to Ice Lake
        "without AVX-512": ("-mno-avx512f",),
        "without AVX": ("-mno-avx",),
    }


def _macros(flags: Sequence[str]) -> bytes:
    """What the compiler defines for kernels with `flags`."""
    given = ["-march=native", *flags, "-dM", "-E", "-x", "c++", os.devnull]
    try:
        return subprocess.check_output([*find_compiler(), *given])
    except (KernelBuildError, subprocess.CalledProcessError):
        return " ".join(flags).encode()  # its tests are skipped, or fail, alone


# The first set with the same macros: where this machine lacks what is forbidden, the kernels would
# be compiled and tested twice.
_FIRST_ALIKE: dict[str, str] = {}
_names: dict[bytes, str] = {}
for _name, _flags in _FORBIDDEN.items():
    _FIRST_ALIKE[_name] = _names.setdefault(_macros(_flags), _name)
INSTRUCTION_SETS = [*_names.values()]
every_instruction_set = pytest.mark.parametrize("instructions", INSTRUCTION_SETS)


def kernels_for(instructions: str) -> CpuKernels:
    """The kernels for a machine of that kind; each is compiled once and cached."""
    return load_cpu_kernels(*_FORBIDDEN[_FIRST_ALIKE[instructions]])
