"""Reads the tensors of a layer's mixer: attention or the gated delta rule.

Shapes: Hk key heads, Hv value heads, Dk and Dv their dims, K the width of a convolution over W
channels.
"""

from dataclasses import replace

import torch

from sgl_pipeline.pp_runner.base.state_shape import StateShape
from sgl_pipeline.pp_runner.layer_kernels.gated_delta import GatedDeltaWeights
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import HeadNorms, Linear
from sgl_pipeline.pp_runner.model.families import StateNames
from sgl_pipeline.pp_runner.model.layer_tensors import LayerTensors
from sgl_pipeline.pp_runner.model.mixers import AttentionMixer, GatedDeltaMixer, Mixer
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.weights.kv_scales import KvScales


def load_mixer(spec: DecoderSpec, tensors: LayerTensors, layer: int) -> Mixer:
    """The mixer of `layer`, whose tensors are `tensors`.

    Raises CheckpointError as `WeightSource.read`.
    """
    state = spec.state_of(layer)
    if state is None:
        return _load_attention(spec, tensors)
    assert spec.names.state is not None
    return _load_gated_delta(spec, spec.names.state, tensors, state)


def _load_attention(spec: DecoderSpec, tensors: LayerTensors) -> AttentionMixer:
    names, hidden, heads = spec.names, spec.hidden_size, spec.num_query_heads
    query_width, kv_width = heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    scales = tensors.kv_scales(names.qkv[0])
    # A norm of the keys would undo the scaling before it.
    in_projections = replace(scales, key=1.0) if spec.qk_norm else scales
    widths = (query_width, kv_width, kv_width)
    factors = in_projections.of_projections(widths)
    gate: Linear | None = None
    if spec.output_gate:
        qkv, gate = tensors.linear_and_gate(
            names.qkv, widths, hidden, spec.qkv_bias, heads, factors
        )
    else:
        qkv = tensors.linear(names.qkv, widths, hidden, spec.qkv_bias, factors)
    return AttentionMixer(
        qkv=qkv,
        head_norms=_load_head_norms(spec, tensors, scales) if spec.qk_norm else None,
        sinks=_load_sinks(spec, tensors),
        gate=gate,
        output=tensors.linear(
            (names.output,), (hidden,), query_width, spec.output_bias, input_factor=scales.value
        ),
    )


def _load_head_norms(spec: DecoderSpec, tensors: LayerTensors, scales: KvScales) -> HeadNorms:
    query, key = (
        tensors.weight(name, (spec.head_dim,))
        for name in (spec.names.query_norm, spec.names.key_norm)
    )
    offset = spec.norm_offset
    if scales.key != 1.0 and offset:
        query, key, offset = query + offset, key + offset, 0.0
    return HeadNorms(query * scales.key, key / scales.key, spec.norm_epsilon, offset)


def _load_sinks(spec: DecoderSpec, tensors: LayerTensors) -> torch.Tensor | None:
    name = spec.names.sinks
    return None if name is None else tensors.vector(name, spec.num_query_heads).float()


def _load_gated_delta(
    spec: DecoderSpec, names: StateNames, tensors: LayerTensors, state: StateShape
) -> GatedDeltaMixer:
    hidden, num_values = spec.hidden_size, state.num_value_heads
    value_width = num_values * state.value_dim
    if names.qkvz is None:
        qkv, z, b, a = (
            tensors.linear((name,), (width,), hidden, False)
            for name, width in (
                (names.qkv, state.num_channels),
                (names.z, value_width),
                (names.b, num_values),
                (names.a, num_values),
            )
        )
    else:
        assert names.ba is not None
        groups = state.num_key_heads
        of_group = value_width // groups
        sizes = (state.key_dim, state.key_dim, of_group, of_group)
        qkv, z = tensors.linears_of_turns(names.qkvz, groups, sizes, hidden, ((0, 1, 2), (3,)))
        each = num_values // groups
        b, a = tensors.linears_of_turns(names.ba, groups, (each, each), hidden, ((0,), (1,)))
    conv = tensors.weight(names.conv, (state.num_channels, 1, state.conv_width))
    return GatedDeltaMixer(
        qkv=qkv,
        z=z,
        b=b,
        a=a,
        weights=GatedDeltaWeights(
            conv=conv[:, 0].T.contiguous(),
            a_log=tensors.exact_vector(names.a_log, num_values),
            dt_bias=tensors.exact_vector(names.dt_bias, num_values),
            norm=tensors.weight(names.norm, (state.value_dim,)),
            epsilon=spec.norm_epsilon,
        ),
        output=tensors.linear((names.output,), (hidden,), value_width, False),
    )
