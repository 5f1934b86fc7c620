"""The compiled kernels as machines with fewer instructions than this one have them."""

import platform

import pytest
import torch

from sgl_pipeline.pp_runner.cpu_kernels.library import CpuKernels, load_cpu_kernels

_WITHOUT_AMX = ("-mno-amx-bf16", "-mno-amx-tile")
_FORBIDDEN: dict[str, tuple[str, ...]] = {
    "native": (),
    "without AMX": _WITHOUT_AMX,
    "without AVX-512": ("-mno-avx512f",),
    "without AVX": ("-mno-avx",),
}
if torch.backends.cpu.get_cpu_capability() == "AVX512":
    # Skylake-X to Ice Lake. Elsewhere they would be the native ones a second time.
    _FORBIDDEN["without AVX-512 BF16"] = ("-mno-avx512bf16", *_WITHOUT_AMX)
INSTRUCTION_SETS = list(_FORBIDDEN) if platform.machine() == "x86_64" else ["native"]
every_instruction_set = pytest.mark.parametrize("instructions", INSTRUCTION_SETS)


def kernels_for(instructions: str) -> CpuKernels:
    """The kernels for a machine of that kind; each is compiled once and cached."""
    return load_cpu_kernels(*_FORBIDDEN[instructions])
