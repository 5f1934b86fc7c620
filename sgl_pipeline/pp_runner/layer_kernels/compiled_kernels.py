"""The layer kernels on CPU cores, compiled from `cpu_kernels/`.

It hands raw pointers to C++, so it must never pass a tensor on whose shape, type or layout was not
checked.
"""

import torch

from sgl_pipeline.pp_runner.base.kv_format import CODED_DTYPES, head_dim_of
from sgl_pipeline.pp_runner.base.state_rows import StateRows
from sgl_pipeline.pp_runner.cpu_kernels.library import CPU_DTYPES, CpuKernels, KvFormat
from sgl_pipeline.pp_runner.layer_kernels.compiled_gated_delta import (
    check_tensors,
    compiled_gated_delta,
)
from sgl_pipeline.pp_runner.layer_kernels.compiled_linear import CompiledLinear
from sgl_pipeline.pp_runner.layer_kernels.compiled_quantized import (
    CompiledExpandedLinear,
    CompiledInt4Linear,
    CompiledInt8Linear,
    CompiledMxfp4Linear,
)
from sgl_pipeline.pp_runner.layer_kernels.compiled_router import CompiledRouter
from sgl_pipeline.pp_runner.layer_kernels.gated_delta import GatedDeltaWeights, LayerStates
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
from sgl_pipeline.pp_runner.layer_kernels.torch_quantized import torch_linear
from sgl_pipeline.pp_runner.weights.quantized_weights import (
    Int4Weight,
    Int8Weight,
    Matrix,
    Mxfp4Weight,
)


class CompiledKernels:
    """The `LayerKernels` of a CPU stage, for fp32 and bf16, on `torch.get_num_threads()` threads.

    Every result is computed in fp32 and rounded once, where torch rounds after each operation; so
    in bf16 it is within half a unit in the last place of the exact one, and torch's is not. Formats
    that round rows first are further from it (docs/serve.md).
    A row's result is bitwise the same in any microbatch, and so is a state after it.
    """

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def linear(self, weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
        """Our own product in bf16, and of quantized weights where the machine has the instructions;
        else torch's."""
        return self._compiled(weight, bias) or torch_linear(weight, bias)

    def gated_linear(self, weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
        """One kernel where `linear` is ours."""
        compiled = self._compiled(weight, bias, is_gated=True)
        return compiled or GatedLinear(torch_linear(weight, bias), self.gate)

    def _compiled(
        self, weight: Matrix, bias: torch.Tensor | None, *, is_gated: bool = False
    ) -> Linear | None:
        kernels = self._kernels
        if weight.dtype != torch.bfloat16:
            return None
        if isinstance(weight, Int8Weight):
            if not kernels.has_int8_products:
                return None
            return CompiledInt8Linear(kernels, weight, bias, is_gated=is_gated)
        if isinstance(weight, Int4Weight) and weight.rounds_rows:
            if not kernels.has_int8_products:
                return None
            return CompiledInt4Linear(kernels, weight, bias, is_gated=is_gated)
        if not kernels.has_products:
            return None
        if isinstance(weight, torch.Tensor):
            return CompiledLinear(kernels, weight, bias, is_gated=is_gated)
        if isinstance(weight, Mxfp4Weight):
            return CompiledMxfp4Linear(kernels, weight, bias, is_gated=is_gated)
        return CompiledExpandedLinear(kernels, weight, bias, is_gated=is_gated)

    def router(
        self, rule: RoutingRule, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Router:
        """See `LayerKernels.router`."""
        return CompiledRouter(self._kernels, rule, weight, bias)

    def norm(self, rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        """See `LayerKernels.norm`."""
        normed = torch.empty_like(rows)
        self._rms_norm(rows, None, norm, None, normed)
        return normed

    def add_norm(
        self,
        stream: torch.Tensor,
        added: torch.Tensor,
        norm: RmsNorm,
        may_overwrite: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerKernels.add_norm`."""
        assert added.shape == stream.shape
        sums, normed = torch.empty_like(stream), torch.empty_like(stream)
        self._rms_norm(stream, added, norm, sums, normed)
        return sums, normed

    def add(self, stream: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """See `LayerKernels.add`."""
        _check(stream.dtype, stream, added)
        assert added.shape == stream.shape
        sums = torch.empty_like(stream)
        self._kernels.add(
            is_bf16=stream.dtype == torch.bfloat16,
            num_rows=stream.shape[0],
            size=stream.shape[1],
            rows=stream,
            added=added,
            sums=sums,
            num_threads=torch.get_num_threads(),
        )
        return sums

    def place_heads(
        self,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        rotation: Rotation,
        slots: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """See `LayerKernels.place_heads`."""
        (keys, values), (cosine, sine, interleaved) = pages, rotation
        num_rows, num_kv_heads, head_dim = slots.shape[0], keys.shape[2], head_dim_of(keys)
        kv_format = KvFormat.of(keys)
        num_query_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        _check(qkv.dtype, qkv, *(norms[:2] if norms else ()))
        page_dtype = qkv.dtype if kv_format is KvFormat.NUMBERS else keys.dtype
        _check(page_dtype, keys, values)
        _check(torch.float32, cosine, sine)
        _check(torch.int64, slots)
        assert qkv.shape[0] == num_rows and values.shape == keys.shape
        assert qkv.shape[1] == (num_query_heads + 2 * num_kv_heads) * head_dim
        assert cosine.shape == sine.shape and cosine.shape[0] == num_rows
        assert norms is None or norms.query.shape == norms.key.shape == (head_dim,)
        query = qkv.new_empty(num_rows, num_query_heads, head_dim)
        self._kernels.place_heads(
            is_bf16=qkv.dtype == torch.bfloat16,
            num_rows=num_rows,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotated_dims=2 * cosine.shape[1],
            interleaved=interleaved,
            kv_format=kv_format,
            qkv=qkv,
            query_norm=norms.query if norms else None,
            key_norm=norms.key if norms else None,
            weight_offset=norms.offset if norms else 0.0,
            epsilon=norms.epsilon if norms else 0.0,
            cosine=cosine,
            sine=sine,
            slots=slots,
            query=query,
            key_pages=keys,
            value_pages=values,
            num_threads=torch.get_num_threads(),
        )
        return query

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `LayerKernels.gate`."""
        gated = _gated_rows(gate_up)
        self._kernels.gate(
            is_bf16=gate_up.dtype == torch.bfloat16,
            num_rows=gated.shape[0],
            size=gated.shape[1],
            gate_up=gate_up,
            gated=gated,
            num_threads=torch.get_num_threads(),
        )
        return gated

    def clamped_gate(self, gate_up: torch.Tensor, clamp: GateClamp) -> torch.Tensor:
        """See `LayerKernels.clamped_gate`."""
        assert clamp.alpha > 0 and clamp.limit > 0
        gated = _gated_rows(gate_up)
        self._kernels.clamped_gate(
            is_bf16=gate_up.dtype == torch.bfloat16,
            num_rows=gated.shape[0],
            size=gated.shape[1],
            alpha=clamp.alpha,
            limit=clamp.limit,
            gate_up=gate_up,
            gated=gated,
            num_threads=torch.get_num_threads(),
        )
        return gated

    def output_gate(self, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """See `LayerKernels.output_gate`."""
        _check(rows.dtype, rows, gate)
        assert gate.shape == rows.shape
        gated = torch.empty_like(rows)
        self._kernels.output_gate(
            is_bf16=rows.dtype == torch.bfloat16,
            num_rows=rows.shape[0],
            size=rows.shape[1],
            rows=rows,
            gate=gate,
            gated=gated,
            num_threads=torch.get_num_threads(),
        )
        return gated

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
        """See `LayerKernels.gated_delta`."""
        return compiled_gated_delta(self._kernels, qkv, z, b, a, weights, states, pool)

    def _rms_norm(
        self,
        rows: torch.Tensor,
        added: torch.Tensor | None,
        norm: RmsNorm,
        sums: torch.Tensor | None,
        normed: torch.Tensor,
    ) -> None:
        _check(rows.dtype, rows, norm.weight, *(() if added is None else (added,)))
        num_rows, size = rows.shape
        assert norm.weight.shape == (size,)
        self._kernels.rms_norm(
            is_bf16=rows.dtype == torch.bfloat16,
            num_rows=num_rows,
            size=size,
            rows=rows,
            added=added,
            weight=norm.weight,
            weight_offset=norm.offset,
            epsilon=norm.epsilon,
            sums=sums,
            normed=normed,
            num_threads=torch.get_num_threads(),
        )


def _gated_rows(gate_up: torch.Tensor) -> torch.Tensor:
    """Room for the gated rows [T, F] of `gate_up` [T, 2 F]."""
    _check(gate_up.dtype, gate_up)
    num_rows, width = gate_up.shape
    assert width % 2 == 0
    return gate_up.new_empty(num_rows, width // 2)


def _check(dtype: torch.dtype, *tensors: torch.Tensor) -> None:
    assert dtype in (*CPU_DTYPES, *CODED_DTYPES.values(), torch.int64)
    check_tensors(dtype, *tensors)
