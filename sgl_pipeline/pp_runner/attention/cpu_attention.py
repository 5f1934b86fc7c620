"""Paged attention on CPU cores, by the compiled kernels of `cpu_kernels/attention.cpp`.

If the kernels cannot be built, `pp_runner/kernel_choice.py` falls back to torch. Hands raw pointers
to C++, so it must never pass a tensor on whose shape, type or layout was not checked.
"""

from dataclasses import dataclass

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.base.kv_format import CODED_DTYPES
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout
from sgl_pipeline.pp_runner.cpu_kernels.library import (
    CPU_DTYPES,
    Arithmetic,
    CpuKernels,
    KvFormat,
)

_LARGEST_INT32 = 2**31 - 1


@dataclass(slots=True)
class CpuAttention:
    """The `AttentionBackend` of a CPU stage, for fp32 or bf16 queries, and keys and values of the
    same type or in codes of 8 bits.

    Computes with `arithmetic`, which `kernels` must have for the shape's dtype, by default with the
    fastest, on `num_threads`, by default `torch.get_num_threads()`. A row's result depends only on
    its own query, keys and values: bitwise the same decoded, in one chunk or in many, in any
    microbatch. The work of a layer with a window grows with the window; pages that no row of a
    chunk sees any more are not read.
    """

    shape: AttentionShape
    kernels: CpuKernels
    arithmetic: Arithmetic | None = None
    num_threads: int | None = None
    _layout: PagedLayout | None = None

    def __post_init__(self) -> None:
        assert self.shape.dtype in CPU_DTYPES
        assert self.shape.page_dtype in (self.shape.dtype, *CODED_DTYPES.values())
        assert self.shape.num_query_heads % self.shape.num_kv_heads == 0
        assert self.shape.window is None or self.shape.window > 0
        assert self.shape.softcap is None or self.shape.softcap > 0
        if self.arithmetic is None:
            self.arithmetic = self.kernels.best_arithmetic(self.shape.dtype)
        assert self.arithmetic.dtype == self.shape.dtype and self.kernels.has(self.arithmetic)

    def plan(self, layout: PagedLayout) -> None:
        """Keeps the layout: the kernel splits the work itself. See `AttentionBackend.plan`."""
        indices = (layout.query_indptr, layout.page_indptr, layout.page_indices, layout.kv_lengths)
        assert layout.page_size == self.shape.page_size
        assert all(i.dtype == torch.int32 and i.is_contiguous() for i in indices)
        self._layout = layout

    def attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        shape, layout = self.shape, self._layout
        assert layout is not None, "attend before plan"
        assert self.arithmetic is not None  # since __post_init__
        assert query.shape[1:] == (shape.num_query_heads, shape.head_dim)
        assert query.stride()[1:] == (shape.head_dim, 1), "a row of query is not contiguous"
        assert query.dtype == shape.dtype
        assert key_pages.shape[1:] == shape.key_page_shape
        assert value_pages.shape[1:] == shape.value_page_shape
        for pages in (key_pages, value_pages):
            assert pages.dtype == shape.page_dtype and pages.is_contiguous()
        assert (sinks is not None) == shape.has_sinks
        if sinks is not None:
            assert sinks.shape == (shape.num_query_heads,) and sinks.is_contiguous()
            assert sinks.dtype == torch.float32
        out = torch.empty((*query.shape[:2], shape.value_dim), dtype=query.dtype)
        self.kernels.paged_attention(
            arithmetic=self.arithmetic,
            query=query,
            query_row_stride=query.stride(0),
            key_pages=key_pages,
            value_pages=value_pages,
            out=out,
            query_indptr=layout.query_indptr,
            page_indptr=layout.page_indptr,
            page_indices=layout.page_indices,
            kv_lengths=layout.kv_lengths,
            num_chunks=layout.num_chunks,
            page_size=shape.page_size,
            num_query_heads=shape.num_query_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            scale=shape.scale,
            window=min(shape.window or 0, _LARGEST_INT32),
            softcap=shape.softcap or 0.0,
            sinks=sinks,
            kv_format=KvFormat.of(key_pages),
            num_threads=self.num_threads or torch.get_num_threads(),
        )
        return out
