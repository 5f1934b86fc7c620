"""The decoder layer that all supported families share.

It holds weights only: keys and values live in the `KvPool`, and a layer's output is one tensor, the
residual stream in the model's dtype, so that a stage boundary may lie between any two layers.

Shapes: T rows of the step, H hidden size, Hq query heads, Hkv key/value
heads, D head dim.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import LayerwiseAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import (
    HeadNorms,
    LayerKernels,
    Linear,
    RmsNorm,
    Rotation,
)
from sgl_pipeline.pp_runner.model.layer_tensors import LayerTensors
from sgl_pipeline.pp_runner.model.mlp import GatedMlp, Mlp
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.model.moe import SparseMlp
from sgl_pipeline.pp_runner.weights.checkpoint import WeightSource
from sgl_pipeline.pp_runner.weights.kv_scales import KvScales


class LayerParts(NamedTuple):
    """The parts that a layer computes with, in the order of its use. The norms of outputs are those
    of attention and MLP before they are added to the stream; None where there are none. `sinks`
    [Hq] in fp32 are those of the attention, if it has them."""

    attention_norm: RmsNorm
    qkv: Linear
    head_norms: HeadNorms | None
    sinks: torch.Tensor | None
    output: Linear
    attention_output_norm: RmsNorm | None
    mlp_norm: RmsNorm
    mlp: Mlp
    mlp_output_norm: RmsNorm | None


class DecoderLayer:
    """Attention and MLP, each behind an RMS norm and added to the residual stream.

    Args:
        layer: model-wide id.
        kernels: compute everything except attention.
    """

    def __init__(self, layer: int, parts: LayerParts, kernels: LayerKernels) -> None:
        self.layer = layer
        self._parts = parts
        self._kernels = kernels

    @classmethod
    def load(
        cls, spec: DecoderSpec, layer: int, weights: WeightSource, kernels: LayerKernels
    ) -> "DecoderLayer":
        """The layer of a model with the biases, norms and kind of MLP of `spec`, from its tensors;
        `layer` is also the number in the checkpoint's names."""
        prefix = spec.names.layer.format(layer=layer) + "."
        tensors = LayerTensors(prefix, weights, kernels, spec.quantization)
        return cls(layer, _load_parts(spec, tensors, layer), kernels)

    @property
    def has_experts(self) -> bool:
        return isinstance(self._parts.mlp, SparseMlp)

    def forward(
        self,
        stream: torch.Tensor,
        rotation: Rotation,
        slots: torch.Tensor,
        kv_pool: KvPool,
        attention: LayerwiseAttention,
        may_overwrite: bool = False,
    ) -> torch.Tensor:
        """The residual stream [T, H] after this layer.

        Writes the keys and values of the rows into `slots` [T] of the layer's pages, and writes
        over `stream` only if it `may_overwrite`. The result is a new tensor either way.
        """
        parts, kernels, pages = self._parts, self._kernels, kv_pool.pages(self.layer)
        qkv = parts.qkv(kernels.norm(stream, parts.attention_norm))
        query = kernels.place_heads(qkv, parts.head_norms, rotation, slots, pages)
        attended = attention.of(self.layer).attend(query, *pages, parts.sinks)
        output = parts.output(attended.flatten(1))
        if parts.attention_output_norm is not None:
            output = kernels.norm(output, parts.attention_output_norm)
        stream, normed = kernels.add_norm(stream, output, parts.mlp_norm, may_overwrite)
        mixed = parts.mlp(normed)
        if parts.mlp_output_norm is not None:
            mixed = kernels.norm(mixed, parts.mlp_output_norm)
        return kernels.add(stream, mixed)


def _load_parts(spec: DecoderSpec, tensors: LayerTensors, layer: int) -> LayerParts:
    names, hidden = spec.names, spec.hidden_size
    query_width, kv_width = (
        num_heads * spec.head_dim for num_heads in (spec.num_query_heads, spec.num_kv_heads)
    )
    scales = tensors.kv_scales(names.qkv[0])
    # A norm of the keys would undo the scaling before it.
    in_projections = replace(scales, key=1.0) if spec.qk_norm else scales
    widths = (query_width, kv_width, kv_width)
    factors = in_projections.of_projections(widths)
    return LayerParts(
        attention_norm=load_norm(spec, tensors, names.attention_norm),
        qkv=tensors.linear(names.qkv, widths, hidden, spec.qkv_bias, factors),
        head_norms=_load_head_norms(spec, tensors, scales) if spec.qk_norm else None,
        sinks=_load_sinks(spec, tensors),
        output=tensors.linear(
            (names.output,), (hidden,), query_width, spec.output_bias, input_factor=scales.value
        ),
        attention_output_norm=_load_output_norm(spec, tensors, names.attention_output_norm),
        mlp_norm=load_norm(spec, tensors, names.mlp_norm),
        mlp=_load_mlp(spec, tensors, layer),
        mlp_output_norm=_load_output_norm(spec, tensors, names.mlp_output_norm),
    )


def load_norm(spec: DecoderSpec, tensors: LayerTensors, name: str) -> RmsNorm:
    """The norm `name` over the hidden size."""
    return RmsNorm(tensors.weight(name, (spec.hidden_size,)), spec.norm_epsilon)


def _load_output_norm(spec: DecoderSpec, tensors: LayerTensors, name: str | None) -> RmsNorm | None:
    return None if name is None else load_norm(spec, tensors, name)


def _load_head_norms(spec: DecoderSpec, tensors: LayerTensors, scales: KvScales) -> HeadNorms:
    query, key = (
        tensors.weight(name, (spec.head_dim,))
        for name in (spec.names.query_norm, spec.names.key_norm)
    )
    return HeadNorms(query * scales.key, key / scales.key, spec.norm_epsilon)


def _load_sinks(spec: DecoderSpec, tensors: LayerTensors) -> torch.Tensor | None:
    name = spec.names.sinks
    return None if name is None else tensors.vector(name, spec.num_query_heads).float()


def _load_mlp(spec: DecoderSpec, tensors: LayerTensors, layer: int) -> Mlp:
    experts = spec.layer_experts(layer)
    if experts is not None:
        return SparseMlp.load(tensors, spec.names, spec.hidden_size, experts)
    return GatedMlp.load(
        tensors, spec.names.mlp, spec.hidden_size, spec.intermediate_size, spec.mlp_bias
    )
