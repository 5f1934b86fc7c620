"""Layers with made-up weights, one of each kind, ready to be timed: ours, or those of transformers.

Both are timed as they run in a stage: ours from recorded calls where a stage would record them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape, StageAttention
from sgl_pipeline.pp_runner.attention.cpu_attention import CpuAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.attention.state_pool import StepStates, state_pool_of
from sgl_pipeline.pp_runner.base.kv_format import encode, head_dim_of
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.cpu_kernels.call_recording import record
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels, Rotation
from sgl_pipeline.pp_runner.made_up_weights import MadeUpWeights
from sgl_pipeline.pp_runner.model.decoder import DecoderLayer
from sgl_pipeline.pp_runner.model.generic.spec import GenericSpec
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.model.rotary import RotaryEmbedding
from sgl_pipeline.pp_runner.recorded_layers import MOST_ROWS, step_variables

Call = Callable[[], object]


class MeasuredLayers(Protocol):
    """The first layer of each kind."""

    @property
    def kind_bytes(self) -> Sequence[int]:
        """The bytes of a layer's weights, for each kind."""

    def calls(self, inputs: StepInputs) -> list[Call]:
        """A layer of each kind on a step for which the attention has been planned."""


class NativeLayers:
    """See `MeasuredLayers`."""

    def __init__(
        self,
        spec: DecoderSpec,
        firsts: Sequence[int],
        shapes: Sequence[AttentionShape],
        attention: StageAttention,
        kernels: LayerKernels,
        weights: MadeUpWeights,
    ) -> None:
        self._spec, self._shapes, self._attention = spec, shapes, attention
        self._weights = weights
        self.kind_bytes: list[int] = []
        self._layers: list[DecoderLayer] = []
        for layer in firsts:
            weights.loaded.clear()
            self._layers.append(DecoderLayer.load(spec, layer, weights, kernels))
            self.kind_bytes.append(sum(weights.loaded.values()))

    def calls(self, inputs: StepInputs) -> list[Call]:
        return [self._call(layer, inputs) for layer in self._layers]

    def _call(self, layer: DecoderLayer, inputs: StepInputs) -> Call:
        spec, shapes = self._spec, self._shapes
        kv_pool = written_pool([layer.layer], shapes, inputs)
        state_pool = state_pool_of(
            [layer.layer],
            spec.states,
            inputs.layout.num_chunks,
            shapes[0].dtype,
            shapes[0].device,
        )
        states = None if state_pool is None else StepStates.of(inputs, state_pool)
        rotary = RotaryEmbedding(spec.rope, spec.head_dim, shapes[0].device)
        rotation = rotary.at(inputs.positions)
        stream = self._weights.read("", (inputs.num_tokens, spec.hidden_size))

        return _call_of(layer, inputs, stream, rotation, kv_pool, self._attention, states)


class GenericLayers:
    """See `MeasuredLayers`. A plain layer is one of ours. Any other call is a pass through
    transformers' decoder with one layer, so a layer's time includes what the decoder does once a
    step: some tenths of a millisecond.

    Args:
        path: the model's directory.
    """

    def __init__(
        self,
        spec: GenericSpec,
        path: str,
        firsts: Sequence[int],
        shapes: Sequence[AttentionShape],
        attention: StageAttention,
        kernels: LayerKernels,
        weights: MadeUpWeights,
    ) -> None:
        from sgl_pipeline.pp_runner.model.generic.generic_stage import GenericStageModel

        self._shapes, self._attention, self._weights = shapes, attention, weights
        self._firsts = firsts
        self._model = GenericStageModel(
            spec,
            path,
            lambda: weights,
            dtype=weights.dtype,
            device=weights.device,
            kernels=kernels,
            layers=(),
            is_first=False,
            is_last=False,
        )
        self.kind_bytes: list[int] = []
        for layer in firsts:
            weights.loaded.clear()
            loaded = self._model.read_layer(layer)
            self.kind_bytes.append(loaded.weight_bytes)
            self._model.add_layer(loaded)

    def calls(self, inputs: StepInputs) -> list[Call]:
        stream = self._weights.read("", (inputs.num_tokens, self._model.spec.hidden_size))
        kv_pool = written_pool(self._firsts, self._shapes, inputs)
        if (steps := self._model.plain_steps) is not None:
            stream, rotation = steps.enter(inputs, stream)
            layers = [steps.layers[layer] for layer in self._firsts]
            return [
                _call_of(layer, inputs, stream, rotation, kv_pool, self._attention)
                for layer in layers
            ]
        return [
            partial(self._model.forward, (layer,), inputs, stream, kv_pool, self._attention)
            for layer in self._firsts
        ]


def _call_of(
    layer: DecoderLayer,
    inputs: StepInputs,
    stream: torch.Tensor,
    rotation: Rotation,
    kv_pool: KvPool,
    attention: StageAttention,
    states: StepStates | None = None,
) -> Call:
    """The layer as a stage runs it, from its input: from recorded calls where it can be."""

    def call() -> torch.Tensor:
        return layer.forward(stream, rotation, inputs.slots, kv_pool, attention, states=states)

    is_compiled = isinstance(attention.any, CpuAttention)
    if not is_compiled or inputs.num_tokens > MOST_ROWS:
        return call
    variables = (
        *step_variables(inputs, stream, rotation),
        *_kept(layer.layer, kv_pool, states),
    )
    _, calls = record(call, variables, inputs.num_tokens)
    if calls is None:
        return call
    sizes = (inputs.num_tokens, inputs.layout.num_chunks, torch.get_num_threads())
    return partial(calls.run, variables, *sizes)


def _kept(
    layer: int, kv_pool: KvPool, states: StepStates | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors in which `layer` keeps what it needs of earlier tokens."""
    keys, values = kv_pool.pages(layer)
    if keys.numel():
        return keys, values
    assert states is not None
    kept = states.pool.states(layer)
    return kept.recurrent, kept.conv


def written_pool(
    layers: Sequence[int], shapes: Sequence[AttentionShape], inputs: StepInputs
) -> KvPool:
    """Pages of `layers` for the step: untouched ones would share one page of memory."""
    kv_pool = KvPool(layers, shapes, inputs.layout.page_indices.numel())
    for layer in layers:
        for pages in kv_pool.pages(layer):
            pages.copy_(encode(torch.full((head_dim_of(pages),), 0.5), pages.dtype))
    return kv_pool
