"""The part of a decoder layer that mixes the tokens of a request: attention to pages of keys and
values, or the gated delta rule, which keeps a state.

Mixers hold weights only; pages and states come with each step. Shapes: T rows of the step, H hidden
size, Hq query heads, Hv value heads, D head dim.
"""

from typing import NamedTuple, Protocol

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import LayerwiseAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.attention.state_pool import StepStates
from sgl_pipeline.pp_runner.layer_kernels.gated_delta import GatedDeltaWeights
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import (
    HeadNorms,
    LayerKernels,
    Linear,
    Rotation,
)


class MixerStep(NamedTuple):
    """The needs of a mixer in a step besides its rows: where they are in their requests, the
    `slots` [T] of their keys and values, and the states, if the model has any."""

    rotation: Rotation
    slots: torch.Tensor
    kv_pool: KvPool
    attention: LayerwiseAttention
    states: StepStates | None


class Mixer(Protocol):
    """The part between the first norm of a layer and the residual stream."""

    def __call__(
        self, rows: torch.Tensor, layer: int, step: MixerStep, kernels: LayerKernels
    ) -> torch.Tensor:
        """Returns [T, H] for normed `rows` [T, H] of the model-wide `layer`, in their dtype."""


class AttentionMixer(NamedTuple):
    """Attention to pages, which get the rows' own keys and values first. `sinks` [Hq] in fp32 are
    those of the attention, if it has them; with a `gate` [T, Hq * D] its outputs are gated."""

    qkv: Linear
    head_norms: HeadNorms | None
    sinks: torch.Tensor | None
    gate: Linear | None
    output: Linear

    def __call__(
        self, rows: torch.Tensor, layer: int, step: MixerStep, kernels: LayerKernels
    ) -> torch.Tensor:
        """See `Mixer`."""
        pages = step.kv_pool.pages(layer)
        query = kernels.place_heads(
            self.qkv(rows), self.head_norms, step.rotation, step.slots, pages
        )
        attended = step.attention.of(layer).attend(query, *pages, self.sinks).flatten(1)
        if self.gate is not None:
            attended = kernels.output_gate(attended, self.gate(rows))
        return self.output(attended)


class GatedDeltaMixer(NamedTuple):
    """The gated delta rule; see `LayerKernels.gated_delta` for what the projections are."""

    qkv: Linear
    z: Linear
    b: Linear
    a: Linear
    weights: GatedDeltaWeights
    output: Linear

    def __call__(
        self, rows: torch.Tensor, layer: int, step: MixerStep, kernels: LayerKernels
    ) -> torch.Tensor:
        """See `Mixer`."""
        states = step.states
        assert states is not None, f"layer {layer} needs states"
        projected = self.qkv(rows), self.z(rows), self.b(rows), self.a(rows)
        read = kernels.gated_delta(*projected, self.weights, states.rows, states.pool.states(layer))
        return self.output(read)
