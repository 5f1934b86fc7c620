"""The compiled functions of this directory's C++ sources, as Python calls them.

Used by the CPU leaves of `attention/` and `layer_kernels/`. Knows the functions' argument types and
nothing else: who passes a pointer has checked the tensor behind it.
"""

import ctypes
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from sgl_pipeline.errors import KernelBuildError
from sgl_pipeline.pp_runner.cpu_kernels.build import (
    build_library,
    default_cache_directory,
    find_compiler,
)

CPU_DTYPES = (torch.float32, torch.bfloat16)
_DIRECTORY = Path(__file__).parent
_SOURCES = tuple(sorted(_DIRECTORY.glob("*.cpp")))
_HEADERS = tuple(sorted(_DIRECTORY.glob("*.h")))
_INT, _INT64, _FLOAT, _POINTER = (
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_float,
    ctypes.c_void_p,
)
# In the order of the definitions, which say what each one is.
_ARGUMENT_TYPES: dict[str, list[Any]] = {
    "sglp_has_arithmetic": [_INT],
    "sglp_best_bf16_arithmetic": [],
    "sglp_paged_attention": [_INT, _POINTER, _INT64, *7 * [_POINTER], *5 * [_INT], _FLOAT, _INT],
    "sglp_rms_norm": [_INT, _INT64, _INT, *3 * [_POINTER], _FLOAT, *2 * [_POINTER], _INT],
    "sglp_place_heads": [
        *(_INT, _INT64, *5 * [_INT], *3 * [_POINTER], _FLOAT, *2 * [_POINTER]),
        *(*4 * [_POINTER], _INT),
    ],
    "sglp_gate": [_INT, _INT64, _INT, *2 * [_POINTER], _INT],
    "sglp_has_products": [],
    "sglp_pack_weight": [*2 * [_INT64], *2 * [_POINTER], _INT64],
    "sglp_product": [*3 * [_INT64], _INT, *4 * [_POINTER], _INT],
}


class Arithmetic(IntEnum):
    """How attention computes, and so which bits it gives; `Arithmetic` in attention.cpp."""

    FLOAT32_VECTORS = 0
    BFLOAT16_VECTORS = 1  # bf16 tensors, fp32 arithmetic
    DOT_PRODUCTS = 2  # of bf16 numbers, by AVX-512 BF16
    AMX = 3

    @property
    def dtype(self) -> torch.dtype:
        """Of queries, keys, values and outputs."""
        return torch.float32 if self is Arithmetic.FLOAT32_VECTORS else torch.bfloat16


class CpuKernels:
    """The functions of a compiled library, by name without the prefix.

    Raises KernelBuildError when the file is not a library of ours.
    """

    def __init__(self, library: Path) -> None:
        try:
            # torch's OpenMP runtime is in the process already, so both share one pool of threads.
            loaded = ctypes.CDLL(str(library))
            functions = {name: getattr(loaded, name) for name in _ARGUMENT_TYPES}
        except (OSError, AttributeError) as error:
            raise KernelBuildError(
                f"the compiled kernels in {library} do not load: {error}; delete the file"
            ) from error
        for name, function in functions.items():
            function.argtypes = _ARGUMENT_TYPES[name]
            function.restype = None
        self._has_arithmetic = functions["sglp_has_arithmetic"]
        self._best_bf16_arithmetic = functions["sglp_best_bf16_arithmetic"]
        for name in ("sglp_has_arithmetic", "sglp_best_bf16_arithmetic", "sglp_has_products"):
            functions[name].restype = _INT
        self.pack_weight = functions["sglp_pack_weight"]
        self.paged_attention, self.rms_norm, self.place_heads, self.gate, self.product = (
            _named_in_profiles(f"sglp_{name}", functions[f"sglp_{name}"])
            for name in ("paged_attention", "rms_norm", "place_heads", "gate", "product")
        )
        # Whether `pack_weight` and `product` can be called: they need bf16 instructions.
        self.has_products = bool(functions["sglp_has_products"]())

    def has(self, arithmetic: Arithmetic) -> bool:
        """Whether attention can be computed so on this machine, by this library.

        Asks the operating system to let this process use AMX, which it may refuse.
        """
        return bool(self._has_arithmetic(arithmetic))

    def best_arithmetic(self, dtype: torch.dtype) -> Arithmetic:
        """The fastest one for attention in `dtype`, one of CPU_DTYPES."""
        if dtype == torch.float32:
            return Arithmetic.FLOAT32_VECTORS
        return Arithmetic(self._best_bf16_arithmetic())


def _named_in_profiles(name: str, function: Callable[..., None]) -> Callable[..., None]:
    """`function`, whose calls a running torch profiler (`/start_profile`) sees under `name`."""

    def call(*arguments: Any) -> None:
        if not torch.autograd._profiler_enabled():  # 0.1 us; a record_function takes 6
            return function(*arguments)
        with record_function(name):
            return function(*arguments)

    return call


def load_cpu_kernels(*extra_flags: str) -> CpuKernels:
    """The kernels, compiled for this machine by the first caller (some seconds) and cached.

    `extra_flags` of the compiler can forbid instructions that the machine has.
    Raises KernelBuildError when there is no compiler, it fails, or the cache cannot be used.
    """
    compiler = [*find_compiler(), *extra_flags]
    return CpuKernels(
        build_library("cpu_kernels", _SOURCES, _HEADERS, compiler, default_cache_directory())
    )
