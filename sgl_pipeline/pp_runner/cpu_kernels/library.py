"""The compiled functions of this directory's C++ sources, as Python calls them.

Used by the CPU leaves of `attention/` and `layer_kernels/`. Knows the functions' arguments and
nothing else: whoever passes a tensor has checked its shape, type and layout.
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
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
    """How attention computes, and so which bits it gives; `Arithmetic` in attention.cpp."""

    FLOAT32_VECTORS = 0
    BFLOAT16_VECTORS = 1  # bf16 tensors, fp32 arithmetic
    DOT_PRODUCTS = 2  # of bf16 numbers, by AVX-512 BF16
    AMX = 3

    @property
    def dtype(self) -> torch.dtype:
        """Of queries, keys, values and outputs."""
        return torch.float32 if self is Arithmetic.FLOAT32_VECTORS else torch.bfloat16


class KvFormat(IntEnum):
    """What pages hold (kv_format.py); `KvFormat` in kv_codes.h."""

    NUMBERS = 0
    INT8 = 1
    FLOAT8 = 2

    @classmethod
    def of(cls, pages: torch.Tensor) -> "KvFormat":
        return _CODES.get(pages.dtype, cls.NUMBERS)


_CODES = {torch.int8: KvFormat.INT8, torch.float8_e4m3fn: KvFormat.FLOAT8}


class CpuKernels:
    """The compiled functions. Arguments have the names of the C++ definitions, which say what each
    one is; a test holds the two to each other.

    Attributes:
        has_products: whether `product` and `expanded_product` can be called, which need bf16
            instructions.
        has_int8_products: whether `int8_product` and `int4_product` can, which need VNNI.
    """

    def __init__(self, functions: CompiledFunctions) -> None:
        self._plain, self._kernel = functions.plain, functions.kernel
        self.has_products = bool(self._plain("has_products")())
        self.has_int8_products = bool(self._plain("has_int8_products")())

    def has(self, arithmetic: Arithmetic) -> bool:
        """Whether attention can be computed so on this machine, by this library.

        Asks the operating system to let this process use AMX, which it may refuse.
        """
        return bool(self._plain("has_arithmetic")(arithmetic))

    def best_arithmetic(self, dtype: torch.dtype) -> Arithmetic:
        """The fastest one for attention in `dtype`, one of CPU_DTYPES."""
        if dtype == torch.float32:
            return Arithmetic.FLOAT32_VECTORS
        return Arithmetic(self._plain("best_bf16_arithmetic")())

    def paged_attention(
        self,
        *,
        arithmetic: Arithmetic,
        query: torch.Tensor,
        query_row_stride: int,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        out: torch.Tensor,
        query_indptr: torch.Tensor,
        page_indptr: torch.Tensor,
        page_indices: torch.Tensor,
        kv_lengths: torch.Tensor,
        num_chunks: int,
        page_size: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        kv_format: KvFormat,
        num_threads: int,
    ) -> None:
        """Attends to keys and values in pages (attention.cpp)."""
        self._kernel("paged_attention")(
            arithmetic,
            query.data_ptr(),
            query_row_stride,
            key_pages.data_ptr(),
            value_pages.data_ptr(),
            out.data_ptr(),
            query_indptr.data_ptr(),
            page_indptr.data_ptr(),
            page_indices.data_ptr(),
            kv_lengths.data_ptr(),
            num_chunks,
            page_size,
            num_query_heads,
            num_kv_heads,
            head_dim,
            scale,
            kv_format,
            num_threads,
        )

    def rms_norm(
        self,
        *,
        is_bf16: bool,
        num_rows: int,
        size: int,
        rows: torch.Tensor,
        added: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
        sums: torch.Tensor | None,
        normed: torch.Tensor,
        num_threads: int,
    ) -> None:
        """Norms each row, after the sum with another where one is given (elementwise.cpp)."""
        self._kernel("rms_norm")(
            is_bf16,
            num_rows,
            size,
            rows.data_ptr(),
            None if added is None else added.data_ptr(),
            weight.data_ptr(),
            epsilon,
            None if sums is None else sums.data_ptr(),
            normed.data_ptr(),
            num_threads,
        )

    def place_heads(
        self,
        *,
        is_bf16: bool,
        num_rows: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotated_dims: int,
        interleaved: bool,
        kv_format: KvFormat,
        qkv: torch.Tensor,
        query_norm: torch.Tensor | None,
        key_norm: torch.Tensor | None,
        epsilon: float,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        slots: torch.Tensor,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        num_threads: int,
    ) -> None:
        """Norms and rotates heads, and writes keys and values to their slots (elementwise.cpp)."""
        self._kernel("place_heads")(
            is_bf16,
            num_rows,
            num_query_heads,
            num_kv_heads,
            head_dim,
            rotated_dims,
            interleaved,
            kv_format,
            qkv.data_ptr(),
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            epsilon,
            cosine.data_ptr(),
            sine.data_ptr(),
            slots.data_ptr(),
            query.data_ptr(),
            key_pages.data_ptr(),
            value_pages.data_ptr(),
            num_threads,
        )

    def add(
        self,
        *,
        is_bf16: bool,
        num_rows: int,
        size: int,
        rows: torch.Tensor,
        added: torch.Tensor,
        sums: torch.Tensor,
        num_threads: int,
    ) -> None:
        """Adds rows (elementwise.cpp)."""
        self._kernel("add")(
            is_bf16,
            num_rows,
            size,
            rows.data_ptr(),
            added.data_ptr(),
            sums.data_ptr(),
            num_threads,
        )

    def gate(
        self,
        *,
        is_bf16: bool,
        num_rows: int,
        size: int,
        gate_up: torch.Tensor,
        gated: torch.Tensor,
        num_threads: int,
    ) -> None:
        """Multiplies by silu of the gate (elementwise.cpp)."""
        self._kernel("gate")(
            is_bf16, num_rows, size, gate_up.data_ptr(), gated.data_ptr(), num_threads
        )

    def reorder(
        self,
        *,
        num_rows: int,
        size: int,
        rows: torch.Tensor,
        order: torch.Tensor,
        reordered: torch.Tensor,
        num_threads: int,
    ) -> None:
        """Gives the numbers of each row another order (elementwise.cpp)."""
        self._kernel("reorder")(
            num_rows,
            size,
            rows.data_ptr(),
            order.data_ptr(),
            reordered.data_ptr(),
            num_threads,
        )

    def product(
        self,
        *,
        num_rows: int,
        inputs: int,
        outputs: int,
        gated: bool,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        num_threads: int,
    ) -> None:
        """Multiplies rows by a packed weight (products.cpp)."""
        self._kernel("product")(
            num_rows,
            inputs,
            outputs,
            gated,
            rows.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_threads,
        )

    def int8_product(
        self,
        *,
        num_rows: int,
        inputs: int,
        outputs: int,
        gated: bool,
        rows: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        corrections: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        num_threads: int,
    ) -> None:
        """Multiplies rows, rounded to 8 bits, by a packed weight (int8_products.cpp)."""
        self._kernel("int8_product")(
            num_rows,
            inputs,
            outputs,
            gated,
            rows.data_ptr(),
            weight.data_ptr(),
            scales.data_ptr(),
            corrections.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_threads,
        )

    def int4_product(
        self,
        *,
        num_rows: int,
        inputs: int,
        outputs: int,
        gated: bool,
        group_steps: int,
        rows: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        num_threads: int,
    ) -> None:
        """Multiplies rows, rounded to 8 bits, by a packed weight of 4 bits (int4_products.cpp)."""
        self._kernel("int4_product")(
            num_rows,
            inputs,
            outputs,
            gated,
            group_steps,
            rows.data_ptr(),
            weight.data_ptr(),
            scales.data_ptr(),
            zeros.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_threads,
        )

    def bind_threads(self, num_threads: int, cores: Sequence[int]) -> bool:
        """Keeps each compute thread of the calling thread, itself among them, on one of `cores`, or
        where these are not `num_threads`, on all of them. Says whether the system did
        (threads.cpp)."""
        places = (ctypes.c_int * len(cores))(*cores)
        return self._plain("bind_threads")(num_threads, len(cores), places) == 0

    def expanded_product(
        self,
        *,
        is_fp8: bool,
        num_rows: int,
        inputs: int,
        outputs: int,
        gated: bool,
        group_tiles: int,
        row_group_tiles: int,
        rows: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        num_threads: int,
    ) -> None:
        """Multiplies rows by a packed weight of 4 bits or of FP8 (expanded_products.cpp)."""
        self._kernel("expanded_product")(
            is_fp8,
            num_rows,
            inputs,
            outputs,
            gated,
            group_tiles,
            row_group_tiles,
            rows.data_ptr(),
            weight.data_ptr(),
            scales.data_ptr(),
            None if zeros is None else zeros.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_threads,
        )


def load_cpu_kernels(*extra_flags: str) -> CpuKernels:
    """The kernels, compiled for this machine by the first caller (some seconds) and cached.

    `extra_flags` of the compiler can forbid instructions that the machine has.
    Raises KernelBuildError when there is no compiler, it fails, or the cache cannot be used.
    """
    compiler = [*find_compiler(), *extra_flags]
    library = build_library("cpu_kernels", _SOURCES, _HEADERS, compiler, user_cache_directory())
    return CpuKernels(CompiledFunctions(library))
