"""The compiled kernels as machines with fewer instructions than this one have them."""

import platform

import pytest

from sgl_pipeline.pp_runner.cpu_kernels.library import CpuKernels, load_cpu_kernels

_FORBIDDEN = {
    "native": (),
    "without AMX": ("-mno-amx-bf16", "-mno-amx-tile"),
    "without AVX-512": ("-mno-avx512f",),
    "without AVX": ("-mno-avx",),
}
INSTRUCTION_SETS = list(_FORBIDDEN) if platform.machine() == "x86_64" else ["native"]
every_instruction_set = pytest.mark.parametrize("instructions", INSTRUCTION_SETS)


def kernels_for(instructions: str) -> CpuKernels:
    """The kernels for a machine of that kind; each is compiled once and cached."""
    return load_cpu_kernels(*_FORBIDDEN[instructions])
