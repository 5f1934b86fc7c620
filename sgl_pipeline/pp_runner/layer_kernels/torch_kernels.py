"""The reference layer kernels: plain torch on any device. The others are tested against them.

They serve `--stage-kernels torch`, or machines without faster ones. They round to the model's dtype
where transformers does.
"""

import torch
import torch.nn.functional as F

from sgl_pipeline.pp_runner.base.kv_format import head_dim_of, write_rows
from sgl_pipeline.pp_runner.base.state_rows import StateRows
from sgl_pipeline.pp_runner.layer_kernels.gated_delta import (
    GatedDeltaWeights,
    LayerStates,
    gated_delta,
)
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
from sgl_pipeline.pp_runner.layer_kernels.torch_router import TorchRouter
from sgl_pipeline.pp_runner.weights.quantized_weights import Matrix


class TorchKernels:
    """The `LayerKernels` of any device and dtype; see there."""

    def linear(self, weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
        return torch_linear(weight, bias)

    def gated_linear(self, weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
        return GatedLinear(self.linear(weight, bias), self.gate)

    def router(
        self, rule: RoutingRule, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Router:
        return TorchRouter(rule, weight, bias)

    def norm(self, rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        if not norm.offset:
            return F.rms_norm(rows, norm.weight.shape, norm.weight, norm.epsilon)
        weight = norm.weight.float() + norm.offset
        return F.rms_norm(rows.float(), weight.shape, weight, norm.epsilon).to(rows.dtype)

    def add_norm(
        self,
        stream: torch.Tensor,
        added: torch.Tensor,
        norm: RmsNorm,
        may_overwrite: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = stream + added
        return stream, self.norm(stream, norm)

    def add(self, stream: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return stream + added

    def place_heads(
        self,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        rotation: Rotation,
        slots: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        num_kv_heads, head_dim = pages[0].shape[2], head_dim_of(pages[0])
        heads = qkv.unflatten(1, (-1, head_dim))
        num_query_heads = heads.shape[1] - 2 * num_kv_heads
        query, key, value = heads.split((num_query_heads, num_kv_heads, num_kv_heads), dim=1)
        if norms is not None:
            query = _normed_heads(query, norms.query, norms)
            key = _normed_heads(key, norms.key, norms)
        for store, rows in zip(pages, (rotate(key, rotation), value), strict=True):
            write_rows(store, slots, rows)
        return rotate(query, rotation)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def clamped_gate(self, gate_up: torch.Tensor, clamp: GateClamp) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        return (up + 1) * (gate * (gate * clamp.alpha).sigmoid())

    def output_gate(self, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return rows * gate.sigmoid()

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
        return gated_delta(qkv, z, b, a, weights, states, pool)


def _normed_heads(heads: torch.Tensor, weight: torch.Tensor, norms: HeadNorms) -> torch.Tensor:
    if not norms.offset:
        return weight * F.rms_norm(heads, weight.shape, None, norms.epsilon)
    normed = F.rms_norm(heads.float(), weight.shape, None, norms.epsilon)
    return (normed * (weight.float() + norms.offset)).to(heads.dtype)


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates each pair of dimensions of `heads` [T, any, D] by its row's angle."""
    cosine, sine = (values.to(heads.dtype)[:, None] for values in (rotation.cosine, rotation.sine))
    pairs = cosine.shape[-1]
    first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    if rotation.interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    rotated = heads.clone(memory_format=torch.contiguous_format)
    rotated[..., first].mul_(cosine).addcmul_(heads[..., second], sine, value=-1.0)
    rotated[..., second].mul_(cosine).addcmul_(heads[..., first], sine)
    return rotated
