"""The compiled functions of this directory's C++ sources, as Python calls them."""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch

from sgl_pipeline.pp_runner.cpu_kernels.build import build_library, find_compiler
from sgl_pipeline.pp_runner.cpu_kernels.functions import CompiledFunctions
from sgl_pipeline.user_cache import user_cache_directory

CPU_DTYPES = (torch.float32, torch.bfloat16)
_DIRECTORY = Path(__file__).parent
_SOURCES = tuple(sorted(_DIRECTORY.glob("*.cpp")))
_HEADERS = tuple(sorted(_DIRECTORY.glob("*.h")))


class Arithmetic(IntEnum):
    """The arithmetic of attention, which decides its bits; `Arithmetic` in attention.cpp."""

    FLOAT32_VECTORS = 0
    BFLOAT16_VECTORS = 1  # bf16 tensors, fp32 arithmetic
    DOT_PRODUCTS = 2  # of bf16 numbers, by AVX-512 BF16
    AMX = 3

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of queries, keys, values and outputs."""
        return torch.float32 if self is Arithmetic.FLOAT32_VECTORS else torch.bfloat16


class KvFormat(IntEnum):
    """The numbers in pages (kv_format.py); `KvFormat` in kv_codes.h."""

    NUMBERS = 0
    INT8 = 1
    FLOAT8 = 2

    @classmethod
    def of(cls, pages: torch.Tensor) -> "KvFormat":
        return _CODES.get(pages.dtype, cls.NUMBERS)


_CODES = {torch.int8: KvFormat.INT8, torch.float8_e4m3fn: KvFormat.FLOAT8}


class CpuKernels:
    """The compiled functions. A kernel takes keywords with the names of exports.h; the C++
    definitions describe them. Callers check shapes, types and layouts of tensors first.

    Attributes:
        has_products: whether `product`, `mxfp4_product` and `expanded_product` can be called, which
            need AVX2 with FMA and F16C, or bf16 instructions.
        has_bf16_instructions: whether these do it: weights are packed in another order then.
        most_expanded_tiles: the longest group that `expanded_product` takes, in tiles of 32 inputs;
            0 where it cannot be called.
        has_int8_products: whether `int8_product` and `int4_product` can, which need AVX-512 VNNI
            or AVX2.
        most_int4_tiles: the longest group that `int4_product` takes, in tiles of 32 inputs.
    """

    def __init__(self, functions: CompiledFunctions) -> None:
        self._plain, kernel = functions.plain, functions.kernel
        self.has_products = bool(self._plain("has_products")())
        self.has_bf16_instructions = bool(self._plain("has_bf16_instructions")())
        self.most_expanded_tiles = int(self._plain("most_expanded_tiles")())
        self.has_int8_products = bool(self._plain("has_int8_products")())
        self.most_int4_tiles = int(self._plain("most_int4_tiles")())
        # Attention to keys and values in pages (attention.cpp).
        self.paged_attention = kernel("paged_attention")
        # Norms, sums, rotations and gates of rows (elementwise.cpp).
        self.rms_norm = kernel("rms_norm")
        self.place_heads = kernel("place_heads")
        self.add = kernel("add")
        self.gate = kernel("gate")
        self.clamped_gate = kernel("clamped_gate")
        self.output_gate = kernel("output_gate")
        self.reorder = kernel("reorder")
        # The experts of rows (routing.cpp).
        self.route = kernel("route")
        # The gated delta rule, with a state per request (gated_delta.cpp).
        self.gated_delta = kernel("gated_delta")
        # Products of rows with a packed weight: bf16 (products.cpp), 8 bits (int8_products.cpp),
        # 4 bits (int4_products.cpp), both without VNNI (avx2_int8_products.cpp,
        # avx2_int4_products.cpp), 4 bits or FP8 as bf16 (expanded_products.cpp), MXFP4 as bf16
        # (mxfp4_products.cpp); without bf16 instructions bf16 (vector_products.cpp), MXFP4
        # (avx2_mxfp4_products.cpp), 4 bits and FP8 (avx2_expanded_products.cpp).
        self.product = kernel("product")
        self.int8_product = kernel("int8_product")
        self.int4_product = kernel("int4_product")
        self.mxfp4_product = kernel("mxfp4_product")
        self.expanded_product = kernel("expanded_product")

    def has(self, arithmetic: Arithmetic) -> bool:
        """True if this machine and library have the arithmetic for attention.

        Asks the operating system to let this process use AMX, which it may refuse.
        """
        return bool(self._plain("has_arithmetic")(arithmetic))

    def best_arithmetic(self, dtype: torch.dtype) -> Arithmetic:
        """The fastest one for attention in `dtype`, one of CPU_DTYPES."""
        if dtype == torch.float32:
            return Arithmetic.FLOAT32_VECTORS
        return Arithmetic(self._plain("best_bf16_arithmetic")())

    def bind_threads(self, num_threads: int, cores: Sequence[int]) -> bool:
        """Keeps each compute thread of the calling thread, itself among them, on one of `cores`, or
        on all of them where there are not `num_threads` cores. Returns whether the system did
        (threads.cpp)."""
        places = (ctypes.c_int * len(cores))(*cores)
        return self._plain("bind_threads")(num_threads, len(cores), places) == 0


def load_cpu_kernels(*extra_flags: str) -> CpuKernels:
    """The kernels, compiled for this machine by the first caller (some seconds) and cached; a
    process asks the compiler once what this machine has.

    `extra_flags` of the compiler can forbid instructions that the machine has.
    Raises KernelBuildError when there is no compiler, it fails, or the cache cannot be used.
    """
    return _load((*find_compiler(), *extra_flags), user_cache_directory())


@cache
def _load(compiler: tuple[str, ...], cache_directory: Path) -> CpuKernels:
    library = build_library("cpu_kernels", _SOURCES, _HEADERS, compiler, cache_directory)
    return CpuKernels(CompiledFunctions(library))
