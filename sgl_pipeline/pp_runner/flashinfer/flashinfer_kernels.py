"""The layer kernels of an NVIDIA GPU: FlashInfer's norm, rotary embedding, KV append and gate.

Queries and keys take four kernels on their way to the attention where plain torch takes twenty.
Written against the sources of flashinfer-python 0.6.18 and 0.7.2; the arguments of the functions
are tested on CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_pipeline.pp_runner.base.kv_format import FP8
from sgl_pipeline.pp_runner.base.state_rows import StateRows
from sgl_pipeline.pp_runner.flashinfer.kernel_builds import building_kernels
from sgl_pipeline.pp_runner.layer_kernels.gated_delta import GatedDeltaWeights, LayerStates
from sgl_pipeline.pp_runner.layer_kernels.gpu_quantized import GpuProducts
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import (
    GateClamp,
    GatedLinear,
    HeadNorms,
    Linear,
    RmsNorm,
    Rotation,
    Router,
    RoutingRule,
)
from sgl_pipeline.pp_runner.layer_kernels.row_rounding import RowRounding, open_row_rounding
from sgl_pipeline.pp_runner.layer_kernels.torch_linear import TorchLinear
from sgl_pipeline.pp_runner.layer_kernels.torch_router import TorchRouter
from sgl_pipeline.pp_runner.weights.quantized_weights import Matrix

FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)

Pages = tuple[torch.Tensor, torch.Tensor]


class FlashInferFunctions(Protocol):
    """The functions that we use; tests replace them by definitions in torch."""

    def rmsnorm(self, input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[T, H], or [T, heads, D] with any strides; weight [H] or [D]."""

    def fused_add_rmsnorm(
        self, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        """Adds `input` [T, H] to `residual` [T, H], and writes the norm of the sum, taken before
        that was rounded, over `input`; weight [H]."""

    def silu_and_mul(self, input: torch.Tensor) -> torch.Tensor:
        """[T, F] of [T, 2 F], gate first."""

    def apply_rope_with_cos_sin_cache(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates [T, heads, D] by row `positions[t]` of the cache, [any, R] fp32, the cosines of
        the R / 2 pairs first. Pairs are of the two halves if `is_neox`, else neighbors."""

    def append_paged_kv_cache(
        self,
        append_key: torch.Tensor,
        append_value: torch.Tensor,
        batch_indices: torch.Tensor,
        positions: torch.Tensor,
        paged_kv_cache: Pages,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_last_page_len: torch.Tensor,
    ) -> None:
        """Writes row t, in the dtype of the cache, to position `positions[t]` of request
        `batch_indices[t]`, whose pages are `kv_indices[kv_indptr[r]:kv_indptr[r + 1]]`; all int32.
        """


def open_functions() -> FlashInferFunctions:
    """Returns the library's functions. Raises ConfigurationError when it or a compiler is
    missing."""
    with building_kernels():
        import flashinfer
    functions: FlashInferFunctions = flashinfer
    return functions


def _open_gpu_rounding() -> RowRounding:
    return open_row_rounding(torch.device("cuda"))


@dataclass(frozen=True, slots=True, eq=False)
class _StepTables:
    """The arguments that are the same for all layers of a step, made by the first of them.

    The pool is described as one request with all pages in order: then a slot is a position.
    """

    rotation: Rotation
    cos_sin: torch.Tensor  # [T + 1, R] fp32
    rows: torch.Tensor  # [T] int32, counting
    requests: torch.Tensor  # [T] int32, zeros
    slots: torch.Tensor  # [T] int32
    all_pages: torch.Tensor  # [N] int32, counting
    page_indptr: torch.Tensor  # [2] int32
    last_page_length: torch.Tensor  # [1] int32

    @classmethod
    def of(cls, rotation: Rotation, slots: torch.Tensor, pages: torch.Tensor) -> "_StepTables":
        num_pages, page_size = pages.shape[:2]

        def count(number: int) -> torch.Tensor:
            return torch.arange(number, dtype=torch.int32, device=slots.device)

        num_rows, pairs = rotation.cosine.shape
        # One additional row: for neighbors FlashInfer reads, and ignores, the memory behind the
        # last one.
        table = rotation.cosine.new_empty(num_rows + 1, 2 * pairs)
        torch.cat((rotation.cosine, rotation.sine), dim=1, out=table[:num_rows])
        return cls(
            rotation=rotation,
            cos_sin=table,
            rows=count(len(slots)),
            requests=torch.zeros(len(slots), dtype=torch.int32, device=slots.device),
            slots=slots.int(),
            all_pages=count(num_pages),
            page_indptr=count(2) * num_pages,
            last_page_length=count(1) + page_size,
        )


class FlashInferKernels:
    """The `LayerKernels` of a CUDA stage, for bf16 and fp16; see there.

    It remembers the tables of the last step by its rotation, which is made anew for each.

    Args:
        open_rounding: called before the first number is rounded to 8 bits.
        tried_rows: see `GpuProducts`.
    """

    def __init__(
        self,
        open_library: Callable[[], FlashInferFunctions] = open_functions,
        open_rounding: Callable[[], RowRounding] = _open_gpu_rounding,
        tried_rows: Sequence[int] = (),
    ) -> None:
        self._library = open_library()
        self._products = GpuProducts(open_rounding, tried_rows)
        self._tables: _StepTables | None = None

    def linear(self, weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
        if isinstance(weight, torch.Tensor):
            return TorchLinear(weight, bias)
        return self._products.linear(weight, bias)

    def gated_linear(self, weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
        return GatedLinear(self.linear(weight, bias), self.gate)

    def router(
        self, rule: RoutingRule, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Router:
        return TorchRouter(rule, weight, bias)

    def norm(self, rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        # A step that samples nothing asks for the norm of no rows, for which there is no kernel.
        return self._library.rmsnorm(rows, norm.weight, norm.epsilon) if len(rows) else rows

    def add_norm(
        self,
        stream: torch.Tensor,
        added: torch.Tensor,
        norm: RmsNorm,
        may_overwrite: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not len(stream):
            return stream, added
        # If `stream` belongs to another stage, a copy: no other kernel would round like this one.
        stream = stream if may_overwrite else stream.clone()
        self._library.fused_add_rmsnorm(added, stream, norm.weight, norm.epsilon)
        return stream, added

    def add(self, stream: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return stream + added

    def place_heads(
        self,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        rotation: Rotation,
        slots: torch.Tensor,
        pages: Pages,
    ) -> torch.Tensor:
        num_kv_heads, head_dim = pages[0].shape[2:]
        heads = qkv.unflatten(1, (-1, head_dim))
        num_query_heads = heads.shape[1] - 2 * num_kv_heads
        query, key, value = heads.split((num_query_heads, num_kv_heads, num_kv_heads), dim=1)
        if not len(slots):
            return query
        if norms is not None:
            query = self._library.rmsnorm(query, norms.query, norms.epsilon)
            key = self._library.rmsnorm(key, norms.key, norms.epsilon)
        assert pages[0].dtype != torch.int8, "codes with scales are for CPUs"
        tables = self._tables
        if tables is None or tables.rotation is not rotation:
            tables = self._tables = _StepTables.of(rotation, slots, pages[0])
        query, key = self._library.apply_rope_with_cos_sin_cache(
            tables.rows, query, key, head_dim, tables.cos_sin, not rotation.interleaved
        )
        if pages[0].dtype == FP8:
            # FlashInfer's append would copy bytes, as if all had the dtype of the pages.
            self._products.rounding.append_fp8(key, value, slots, pages)
            return query
        self._library.append_paged_kv_cache(
            key,
            value,
            tables.requests,
            tables.slots,
            pages,
            tables.all_pages,
            tables.page_indptr,
            tables.last_page_length,
        )
        return query

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not len(gate_up):
            return gate_up[:, : gate_up.shape[1] // 2]
        return self._library.silu_and_mul(gate_up)

    def clamped_gate(self, gate_up: torch.Tensor, clamp: GateClamp) -> torch.Tensor:
        raise NotImplementedError("`moe.py` refuses models with this gate on GPUs")

    def output_gate(self, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("models with states, which have such gates, are refused on GPUs")

    def gated_delta(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        weights: GatedDeltaWeights,
        states: StateRows,
        pool: LayerStates,
    ) -> torch.Tensor:
        raise NotImplementedError("models with states are refused on GPUs")
