"""The decoder layer that all supported families share.

It holds weights only: keys and values live in the `KvPool`, states in the `StatePool`. A layer's
output is one tensor, the residual stream in the model's dtype, so that a stage boundary may lie
between any two layers.

Shapes: T rows of the step, H hidden size.
"""

from typing import NamedTuple

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import LayerwiseAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.attention.state_pool import StepStates
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels, RmsNorm, Rotation
from sgl_pipeline.pp_runner.model.layer_tensors import LayerTensors
from sgl_pipeline.pp_runner.model.mixer_loading import load_mixer
from sgl_pipeline.pp_runner.model.mixers import Mixer, MixerStep
from sgl_pipeline.pp_runner.model.mlp import GatedMlp, Mlp
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.model.moe import SparseMlp
from sgl_pipeline.pp_runner.weights.checkpoint import WeightSource


class LayerParts(NamedTuple):
    """The parts that a layer computes with, in the order of its use. The norms of outputs are those
    of mixer and MLP before they are added to the stream; None where there are none."""

    attention_norm: RmsNorm
    mixer: Mixer
    attention_output_norm: RmsNorm | None
    mlp_norm: RmsNorm
    mlp: Mlp
    mlp_output_norm: RmsNorm | None


class DecoderLayer:
    """A mixer and an MLP, each behind an RMS norm and added to the residual stream.

    Args:
        layer: model-wide id.
        kernels: compute everything except attention to pages.
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
        states: StepStates | None = None,
    ) -> torch.Tensor:
        """The residual stream [T, H] after this layer.

        Writes the keys and values of the rows into `slots` [T] of the layer's pages, or replaces
        its `states`, and writes over `stream` only if it `may_overwrite`. The result is a new
        tensor either way.
        """
        parts, kernels = self._parts, self._kernels
        step = MixerStep(rotation, slots, kv_pool, attention, states)
        normed = kernels.norm(stream, parts.attention_norm)
        output = parts.mixer(normed, self.layer, step, kernels)
        if parts.attention_output_norm is not None:
            output = kernels.norm(output, parts.attention_output_norm)
        stream, normed = kernels.add_norm(stream, output, parts.mlp_norm, may_overwrite)
        mixed = parts.mlp(normed)
        if parts.mlp_output_norm is not None:
            mixed = kernels.norm(mixed, parts.mlp_output_norm)
        return kernels.add(stream, mixed)


def _load_parts(spec: DecoderSpec, tensors: LayerTensors, layer: int) -> LayerParts:
    names = spec.names
    return LayerParts(
        attention_norm=load_norm(spec, tensors, names.attention_norm),
        mixer=load_mixer(spec, tensors, layer),
        attention_output_norm=_load_output_norm(spec, tensors, names.attention_output_norm),
        mlp_norm=load_norm(spec, tensors, names.mlp_norm),
        mlp=_load_mlp(spec, tensors, layer),
        mlp_output_norm=_load_output_norm(spec, tensors, names.mlp_output_norm),
    )


def load_norm(spec: DecoderSpec, tensors: LayerTensors, name: str) -> RmsNorm:
    """The norm `name` over the hidden size."""
    weight = tensors.weight(name, (spec.hidden_size,))
    return RmsNorm(weight, spec.norm_epsilon, spec.norm_offset)


def _load_output_norm(spec: DecoderSpec, tensors: LayerTensors, name: str | None) -> RmsNorm | None:
    return None if name is None else load_norm(spec, tensors, name)


def _load_mlp(spec: DecoderSpec, tensors: LayerTensors, layer: int) -> Mlp:
    experts = spec.layer_experts(layer)
    if experts is not None:
        return SparseMlp.load(tensors, spec.names, spec.hidden_size, experts)
    return GatedMlp.load(
        tensors, spec.names.mlp, spec.hidden_size, spec.intermediate_size, spec.mlp_bias
    )
