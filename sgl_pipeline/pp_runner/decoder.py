"""The decoder layer that all supported families share, and the rotary embedding.

Built from a `WeightSource` by `StageModel`, run once a step for each layer. Holds weights only:
keys and values live in the `KvPool`, and what leaves a layer is one tensor, the residual stream in
the model's dtype, so that a stage boundary may lie between any two layers.

Shapes: T rows, H hidden size, Hq query heads, Hkv key/value heads, D head dim, F feed-forward size.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sgl_pipeline.pp_runner.attention.backend import AttentionBackend
from sgl_pipeline.pp_runner.checkpoint import WeightSource
from sgl_pipeline.pp_runner.kv_pool import KvPool
from sgl_pipeline.pp_runner.linear import Linear
from sgl_pipeline.pp_runner.model_spec import ModelSpec, RopeSpec


class Rotation(NamedTuple):
    """The angles of a step's rows: `cosine` [T, 1, D], `sine` [T, 1, D / 2], model dtype."""

    cosine: torch.Tensor
    sine: torch.Tensor


class RotaryEmbedding:
    """Turns positions into angles (RoFormer, arXiv 2104.09864, in the half-split order of Llama).

    The angles are computed in fp32 from the positions of each step, so there is no table and no
    longest position; transformers computes the same numbers.
    """

    def __init__(
        self, rope: RopeSpec, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._frequencies = rotary_frequencies(rope, head_dim).to(device)
        self._dtype = dtype

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of rows at `positions` [T] (int64)."""
        angles = (positions[:, None].float() * self._frequencies)[:, None]
        cosine, sine = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        return Rotation(torch.cat((cosine, cosine), dim=-1), sine)


def rotary_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, [D / 2] fp32, lowest dimension first.

    `llama3` is what `_compute_llama3_parameters` in transformers' modeling_rope_utils.py does:
    wavelengths that fit `high_freq_factor` times into the original context are kept, those that fit
    less than `low_freq_factor` times are stretched by `factor`, the ones between are interpolated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
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
    """Rotates each pair (d, d + D / 2) of `heads` [T, any, D] by its row's angle."""
    half = heads.shape[-1] // 2
    rotated = heads * rotation.cosine
    rotated[..., :half].addcmul_(heads[..., half:], rotation.sine, value=-1.0)
    rotated[..., half:].addcmul_(heads[..., :half], rotation.sine)
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
    """Attention and gated MLP, each behind an RMS norm and added to the residual stream.

    Args:
        spec: the model; says which biases and norms there are.
        layer: model-wide id, which is also the number in the checkpoint's names.
        weights: gives the layer's tensors.
    """

    def __init__(self, spec: ModelSpec, layer: int, weights: WeightSource) -> None:
        self.layer = layer
        self._spec = spec
        tensors = _LayerTensors(f"model.layers.{layer}.", weights)
        hidden, inner = spec.hidden_size, spec.intermediate_size
        query_width, kv_width = (
            num_heads * spec.head_dim for num_heads in (spec.num_query_heads, spec.num_kv_heads)
        )
        self._attention_norm = tensors.norm("input_layernorm", spec)
        self._qkv = tensors.linear(
            hidden,
            {
                "self_attn.q_proj": query_width,
                "self_attn.k_proj": kv_width,
                "self_attn.v_proj": kv_width,
            },
            spec.qkv_bias,
        )
        self._head_norms = tensors.head_norms(spec) if spec.qk_norm else None
        self._output = tensors.linear(query_width, {"self_attn.o_proj": hidden}, spec.output_bias)
        self._mlp_norm = tensors.norm("post_attention_layernorm", spec)
        self._gate_up = tensors.linear(
            hidden, {"mlp.gate_proj": inner, "mlp.up_proj": inner}, spec.mlp_bias
        )
        self._down = tensors.linear(inner, {"mlp.down_proj": hidden}, spec.mlp_bias)

    def forward(
        self,
        stream: torch.Tensor,
        rotation: Rotation,
        slots: torch.Tensor,
        kv_pool: KvPool,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """The residual stream [T, H] after this layer; `stream` itself is left as it was.

        Writes the rows' keys and values into `slots` of the layer's pages.
        """
        query, key, value = self._query_key_value(self._attention_norm(stream), rotation)
        kv_pool.write(self.layer, slots, key, value)
        attended = attention.attend(query, *kv_pool.pages(self.layer))
        stream = stream + self._output(attended.flatten(1))
        gate, up = self._gate_up(self._mlp_norm(stream)).chunk(2, dim=-1)
        return stream + self._down(F.silu(gate).mul_(up))

    def _query_key_value(
        self, normed: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, Hq, D], [T, Hkv, D] and [T, Hkv, D]; views, whose rows are not contiguous."""
        spec = self._spec
        heads = self._qkv(normed).unflatten(-1, (-1, spec.head_dim))
        num_rotated = spec.num_query_heads + spec.num_kv_heads
        # Queries and keys are normed and rotated in one go: [T, Hq + Hkv, D].
        query_key, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if self._head_norms is not None:
            query_key = self._head_norms * F.rms_norm(
                query_key, (spec.head_dim,), None, spec.norm_epsilon
            )
        query_key = rotate(query_key, rotation)
        return query_key[:, : spec.num_query_heads], query_key[:, spec.num_query_heads :], value


class _LayerTensors:
    """Reads one layer's tensors by the names that they have inside the layer."""

    def __init__(self, prefix: str, weights: WeightSource) -> None:
        self._prefix = prefix
        self._weights = weights

    def linear(self, in_features: int, out_features: dict[str, int], has_bias: bool) -> Linear:
        """One product for the named projections, stacked along their outputs."""
        weights, biases = [], []
        for name, size in out_features.items():
            weights.append(self._read(f"{name}.weight", (size, in_features)))
            if has_bias:
                biases.append(self._read(f"{name}.bias", (size,)))
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def norm(self, name: str, spec: ModelSpec) -> RmsNorm:
        """A norm of the residual stream."""
        return RmsNorm(self._read(f"{name}.weight", (spec.hidden_size,)), spec.norm_epsilon)

    def head_norms(self, spec: ModelSpec) -> torch.Tensor:
        """Norm weights of every query head, then of every key head: [Hq + Hkv, D]."""
        query = self._read("self_attn.q_norm.weight", (spec.head_dim,))
        key = self._read("self_attn.k_norm.weight", (spec.head_dim,))
        return torch.cat(
            (query.expand(spec.num_query_heads, -1), key.expand(spec.num_kv_heads, -1))
        )

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._weights.read(self._prefix + name, shape)
