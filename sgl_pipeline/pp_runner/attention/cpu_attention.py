"""Paged attention on CPU cores, by the compiled kernels of `cpu_kernels.cpp`.

Chosen and built by `pp_runner/device.py`, which turns a KernelBuildError into the torch path. Hands
raw pointers to C++, so it must never pass a tensor on whose shape, type or layout was not checked.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_pipeline.errors import KernelBuildError
from sgl_pipeline.pp_runner.attention.backend import AttentionShape
from sgl_pipeline.pp_runner.attention.cpu_build import (
    build_library,
    default_cache_directory,
    find_compiler,
)
from sgl_pipeline.pp_runner.step_inputs import PagedLayout

_SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
_HEADERS = (Path(__file__).with_name("cpu_vectors.h"),)
_ARGUMENT_TYPES: Sequence[Any] = [  # of sglp_paged_attention, in order
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64),  # is_bf16, query and its row stride
    *(7 * [ctypes.c_void_p]),  # pages, out and the layout's four arrays
    *(5 * [ctypes.c_int]),  # sizes
    *(ctypes.c_float, ctypes.c_int),  # scale, num_threads
]
CPU_DTYPES = (torch.float32, torch.bfloat16)


class CpuKernels:
    """The functions of `cpu_kernels.cpp`, loaded from a compiled library.

    Raises KernelBuildError when the file is not a library of ours.
    """

    def __init__(self, library: Path) -> None:
        try:
            # torch's OpenMP runtime is in the process already, so both share one pool of threads.
            self.paged_attention = ctypes.CDLL(str(library)).sglp_paged_attention
        except (OSError, AttributeError) as error:
            raise KernelBuildError(
                f"the compiled kernels in {library} do not load: {error}; delete the file"
            ) from error
        self.paged_attention.argtypes = _ARGUMENT_TYPES
        self.paged_attention.restype = None


def load_cpu_kernels(cache_directory: Path | None = None) -> CpuKernels:
    """The kernels, compiled for this machine by the first caller (a few seconds) and cached.

    Raises KernelBuildError when there is no compiler, it fails, or the cache cannot be used.
    """
    cache_directory = cache_directory or default_cache_directory()
    return CpuKernels(build_library(_SOURCE, _HEADERS, find_compiler(), cache_directory))


@dataclass(slots=True)
class CpuAttention:
    """The `AttentionBackend` of a CPU stage, for fp32 or bf16 queries, keys and values.

    Runs on `torch.get_num_threads()` threads. A row's result depends on nothing but its own query,
    keys and values: bitwise the same decoded, in one chunk or in many, in any microbatch.
    """

    shape: AttentionShape
    kernels: CpuKernels
    _layout: PagedLayout | None = None

    def __post_init__(self) -> None:
        assert self.shape.dtype in CPU_DTYPES
        assert self.shape.num_query_heads % self.shape.num_kv_heads == 0

    def plan(self, layout: PagedLayout) -> None:
        """Keeps the layout: the kernel splits the work itself. See `AttentionBackend.plan`."""
        indices = (layout.query_indptr, layout.page_indptr, layout.page_indices, layout.kv_lengths)
        assert layout.page_size == self.shape.page_size
        assert all(i.dtype == torch.int32 and i.is_contiguous() for i in indices)
        self._layout = layout

    def attend(
        self, query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        shape, layout = self.shape, self._layout
        assert layout is not None, "attend before plan"
        assert query.shape[1:] == (shape.num_query_heads, shape.head_dim)
        assert query.stride()[1:] == (shape.head_dim, 1), "a row of query is not contiguous"
        page_shape = (shape.page_size, shape.num_kv_heads, shape.head_dim)
        for pages in (key_pages, value_pages):
            assert pages.shape[1:] == page_shape and pages.is_contiguous()
            assert pages.dtype == query.dtype == shape.dtype
        out = torch.empty(query.shape, dtype=query.dtype)
        self.kernels.paged_attention(
            shape.dtype == torch.bfloat16,
            query.data_ptr(),
            query.stride(0),
            key_pages.data_ptr(),
            value_pages.data_ptr(),
            out.data_ptr(),
            layout.query_indptr.data_ptr(),
            layout.page_indptr.data_ptr(),
            layout.page_indices.data_ptr(),
            layout.kv_lengths.data_ptr(),
            layout.num_chunks,
            shape.page_size,
            shape.num_query_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.scale,
            torch.get_num_threads(),
        )
        return out
