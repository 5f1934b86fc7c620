"""The decoder layer that all supported families share.

It holds weights only: keys and values live in the `KvPool`, and a layer's output is one tensor, the
residual stream in the model's dtype, so that a stage boundary may lie between any two layers.

Shapes: T rows of the step, H hidden size, Hq query heads, Hkv key/value
heads, D head dim.
"""

from dataclasses import replace

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import LayerwiseAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import (
    HeadNorms,
    LayerKernels,
    RmsNorm,
    Rotation,
)
from sgl_pipeline.pp_runner.model.layer_tensors import LayerTensors
from sgl_pipeline.pp_runner.model.mlp import GatedMlp, Mlp
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.model.moe import SparseMlp
from sgl_pipeline.pp_runner.weights.checkpoint import WeightSource
from sgl_pipeline.pp_runner.weights.kv_scales import KvScales


class DecoderLayer:
    """Attention and MLP, each behind an RMS norm and added to the residual stream.

    Args:
        spec: the model's, with its biases, norms and kind of MLP.
        layer: model-wide id, which is also the number in the checkpoint's names.
        weights: gives the layer's tensors.
        kernels: compute everything except attention.
    """

    def __init__(
        self, spec: DecoderSpec, layer: int, weights: WeightSource, kernels: LayerKernels
    ) -> None:
        self.layer = layer
        self._kernels = kernels
        names, hidden = spec.names, spec.hidden_size
        prefix = names.layer.format(layer=layer) + "."
        tensors = LayerTensors(prefix, weights, kernels, spec.quantization)
        query_width, kv_width = (
            num_heads * spec.head_dim for num_heads in (spec.num_query_heads, spec.num_kv_heads)
        )
        self._attention_norm = load_norm(spec, tensors, names.attention_norm)
        scales = tensors.kv_scales(names.qkv[0])
        # A norm of the keys would undo the scaling before it.
        in_projections = replace(scales, key=1.0) if spec.qk_norm else scales
        widths = (query_width, kv_width, kv_width)
        self._qkv = tensors.linear(
            names.qkv, widths, hidden, spec.qkv_bias, in_projections.of_projections(widths)
        )
        self._head_norms = _load_head_norms(spec, tensors, scales) if spec.qk_norm else None
        self._output = tensors.linear(
            (names.output,),
            (hidden,),
            query_width,
            spec.output_bias,
            input_factor=scales.value,
        )
        self._attention_output_norm = _load_output_norm(spec, tensors, names.attention_output_norm)
        self._mlp_norm = load_norm(spec, tensors, names.mlp_norm)
        self._mlp = _load_mlp(spec, tensors, layer)
        self._mlp_output_norm = _load_output_norm(spec, tensors, names.mlp_output_norm)

    @property
    def has_experts(self) -> bool:
        return isinstance(self._mlp, SparseMlp)

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
        kernels, pages = self._kernels, kv_pool.pages(self.layer)
        qkv = self._qkv(kernels.norm(stream, self._attention_norm))
        query = kernels.place_heads(qkv, self._head_norms, rotation, slots, pages)
        output = self._output(attention.of(self.layer).attend(query, *pages).flatten(1))
        if self._attention_output_norm is not None:
            output = kernels.norm(output, self._attention_output_norm)
        stream, normed = kernels.add_norm(stream, output, self._mlp_norm, may_overwrite)
        mixed = self._mlp(normed)
        if self._mlp_output_norm is not None:
            mixed = kernels.norm(mixed, self._mlp_output_norm)
        return kernels.add(stream, mixed)


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


def _load_mlp(spec: DecoderSpec, tensors: LayerTensors, layer: int) -> Mlp:
    experts = spec.layer_experts(layer)
    if experts is not None:
        return SparseMlp.load(tensors, spec.names, spec.hidden_size, experts)
    return GatedMlp.load(
        tensors, spec.names.mlp, spec.hidden_size, spec.intermediate_size, spec.mlp_bias
    )
