"""The decoder layer that all supported families share, and the rotary embedding.

Built from a `WeightSource` by `StageModel`, run once a step for each layer. Holds weights only:
keys and values live in the `KvPool`, and what leaves a layer is one tensor, the residual stream in
the model's dtype, so that a stage boundary may lie between any two layers.

Shapes: T rows of the step, P rows with their padding, H hidden size, Hq query heads, Hkv key/value
heads, D head dim, of which R are rotated.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sgl_pipeline.pp_runner.attention.backend import AttentionBackend
from sgl_pipeline.pp_runner.checkpoint import WeightSource
from sgl_pipeline.pp_runner.kv_pool import KvPool
from sgl_pipeline.pp_runner.layer_tensors import LayerTensors
from sgl_pipeline.pp_runner.linear import pad_rows
from sgl_pipeline.pp_runner.mlp import GatedMlp, Mlp
from sgl_pipeline.pp_runner.model_spec import ModelSpec, RopeSpec
from sgl_pipeline.pp_runner.moe import SparseMlp


class Rotation(NamedTuple):
    """The angles of a step's rows, in the model's dtype, and which dimensions are pairs.

    `cosine` is [P, 1, D], one where a dimension is not rotated; `sine` [P, 1, R / 2]. A pair is the
    i-th dimension of `first` and the i-th of `second`.
    """

    cosine: torch.Tensor
    sine: torch.Tensor
    first: slice
    second: slice


class RotaryEmbedding:
    """Turns positions into angles (RoFormer, arXiv 2104.09864), for pairs of half-heads (Llama) or
    of neighbours (GLM), of the whole head or its first dimensions.

    The angles are computed in fp32 from the positions of each step, so there is no table and no
    longest position; transformers computes the same numbers.
    """

    def __init__(
        self, rope: RopeSpec, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        rotated = rope.rotated_dims(head_dim)
        self._frequencies = rotary_frequencies(rope, head_dim).to(device)
        self._head_dim = head_dim
        self._dtype = dtype
        self._first, self._second = slice(0, rotated // 2), slice(rotated // 2, rotated)
        if rope.interleaved:
            self._first, self._second = slice(0, rotated, 2), slice(1, rotated, 2)

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of rows at `positions` [T] (int64)."""
        angles = (positions[:, None].float() * self._frequencies)[:, None]
        sine = angles.sin().to(self._dtype)
        cosine = sine.new_ones(len(positions), 1, self._head_dim)
        cosine[..., self._first] = cosine[..., self._second] = angles.cos()
        return Rotation(cosine, sine, self._first, self._second)


def rotary_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, [R / 2] fp32, lowest dimension first.

    `llama3` is what `_compute_llama3_parameters` in transformers' modeling_rope_utils.py does:
    wavelengths that fit `high_freq_factor` times into the original context are kept, those that fit
    less than `low_freq_factor` times are stretched by `factor`, the ones between are interpolated.
    """
    rotated = rope.rotated_dims(head_dim)
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        (factor,) = rope.factors
        return frequencies / factor
    if rope.kind == "llama3":
        factor, low_turns, high_turns, original_context = rope.factors
        turns = original_context * frequencies / (2 * math.pi)
        kept_share = ((turns - low_turns) / (high_turns - low_turns)).clamp(0.0, 1.0)
        return (1 - kept_share) * frequencies / factor + kept_share * frequencies
    return frequencies


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates each pair of dimensions of `heads` [T, any, D] by its row's angle."""
    cosine, sine, first, second = rotation
    rotated = heads * cosine
    rotated[..., first].addcmul_(heads[..., second], sine, value=-1.0)
    rotated[..., second].addcmul_(heads[..., first], sine)
    return rotated


class RmsNorm:
    """Root mean square norm (arXiv 1910.07467) over the last dimension, times `weight`."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self._weight = weight
        self._epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., H] in the dtype of `x`; computed in fp32."""
        return F.rms_norm(x, self._weight.shape, self._weight, self._epsilon)


class DecoderLayer:
    """Attention and MLP, each behind an RMS norm and added to the residual stream.

    Args:
        spec: the model; says which biases and norms there are, and what the MLP is.
        layer: model-wide id, which is also the number in the checkpoint's names.
        weights: gives the layer's tensors.
    """

    def __init__(self, spec: ModelSpec, layer: int, weights: WeightSource) -> None:
        self.layer = layer
        self._spec = spec
        names, hidden = spec.names, spec.hidden_size
        tensors = LayerTensors(names.layer.format(layer=layer) + ".", weights)
        query_width, kv_width = (
            num_heads * spec.head_dim for num_heads in (spec.num_query_heads, spec.num_kv_heads)
        )
        self._attention_norm = _load_norm(spec, tensors, names.attention_norm)
        self._qkv = tensors.linear(
            names.qkv, (query_width, kv_width, kv_width), hidden, spec.qkv_bias
        )
        self._head_norms = _load_head_norms(spec, tensors) if spec.qk_norm else None
        self._output = tensors.linear((names.output,), (hidden,), query_width, spec.output_bias)
        self._attention_output_norm = _load_norm(spec, tensors, names.attention_output_norm)
        self._mlp_norm = _load_norm(spec, tensors, names.mlp_norm)
        self._mlp = _load_mlp(spec, tensors, layer)
        self._is_sparse = isinstance(self._mlp, SparseMlp)
        self._mlp_output_norm = _load_norm(spec, tensors, names.mlp_output_norm)

    def forward(
        self,
        stream: torch.Tensor,
        rotation: Rotation,
        slots: torch.Tensor,
        kv_pool: KvPool,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """The residual stream [P, H] after this layer; `stream` itself is left as it was.

        Writes the keys and values of the T rows into `slots` [T] of the layer's pages. The P - T
        rows of padding (see `pad_rows`) go through the products only.
        """
        num_tokens = slots.shape[0]
        query, key, value = self._query_key_value(self._attention_norm(stream), rotation)
        kv_pool.write(self.layer, slots, key[:num_tokens], value[:num_tokens])
        attended = attention.attend(query[:num_tokens], *kv_pool.pages(self.layer))
        output = self._output(pad_rows(attended.flatten(1)))
        stream = stream + self._attention_output_norm(output)
        normed = self._mlp_norm(stream)
        if self._is_sparse:
            # Rows of padding would be routed as well, to experts that nobody else may need.
            mixed = pad_rows(self._mlp(normed[:num_tokens]))
        else:
            mixed = self._mlp(normed)
        return stream + self._mlp_output_norm(mixed)

    def _query_key_value(
        self, normed: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[P, Hq, D], [P, Hkv, D] and [P, Hkv, D]; views, whose rows are not contiguous."""
        spec = self._spec
        heads = self._qkv(normed).unflatten(-1, (-1, spec.head_dim))
        num_rotated = spec.num_query_heads + spec.num_kv_heads
        # Queries and keys are normed and rotated in one go: [P, Hq + Hkv, D].
        query_key, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if self._head_norms is not None:
            query_key = self._head_norms * F.rms_norm(
                query_key, (spec.head_dim,), None, spec.norm_epsilon
            )
        query_key = rotate(query_key, rotation)
        return query_key[:, : spec.num_query_heads], query_key[:, spec.num_query_heads :], value


def _load_norm(
    spec: ModelSpec, tensors: LayerTensors, name: str | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm `name` over the hidden size; where there is none, what leaves rows as they are."""
    if name is None:
        return lambda rows: rows
    return RmsNorm(tensors.weight(name, (spec.hidden_size,)), spec.norm_epsilon)


def _load_head_norms(spec: ModelSpec, tensors: LayerTensors) -> torch.Tensor:
    """Norm weights of every query head, then of every key head: [Hq + Hkv, D]."""
    query = tensors.weight(spec.names.query_norm, (spec.head_dim,))
    key = tensors.weight(spec.names.key_norm, (spec.head_dim,))
    return torch.cat((query.expand(spec.num_query_heads, -1), key.expand(spec.num_kv_heads, -1)))


def _load_mlp(spec: ModelSpec, tensors: LayerTensors, layer: int) -> Mlp:
    experts = spec.layer_experts(layer)
    if experts is not None:
        return SparseMlp.load(tensors, spec.names, spec.hidden_size, experts)
    return GatedMlp.load(
        tensors, spec.names.mlp, spec.hidden_size, spec.intermediate_size, spec.mlp_bias
    )
