"""The rotary embedding (RoFormer, arXiv 2104.09864): from positions to angles.

Computed once a step; `layer_kernels/` rotates the heads by these angles. Keeps no table, so there
is no longest position.
"""

import math

import torch

from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Rotation
from sgl_pipeline.pp_runner.model.rope_spec import (
    LinearScaling,
    Llama3Scaling,
    PairScaling,
    RopeSpec,
    YarnScaling,
)


class RotaryEmbedding:
    """The angles of a model, computed in fp32 from the positions of each step; transformers
    computes the same numbers."""

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._frequencies = rotary_frequencies(rope, head_dim).to(device)
        self._attention_factor = rope.attention_factor
        self._interleaved = rope.interleaved

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of rows at `positions` [T] (int64)."""
        angles = positions[:, None].float() * self._frequencies
        cosine, sine = angles.cos(), angles.sin()
        if self._attention_factor != 1.0:
            cosine, sine = cosine * self._attention_factor, sine * self._attention_factor
        return Rotation(cosine, sine, self._interleaved)


def rotary_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, [R / 2] fp32, lowest dimension first: what
    transformers' modeling_rope_utils.py computes."""
    rotated = rope.rotated_dims(head_dim)
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    positions_per_radian = rope.theta**exponents
    frequencies = 1.0 / positions_per_radian
    match rope.scaling:
        case LinearScaling(factor):
            return frequencies / factor
        case PairScaling(factors):
            return 1.0 / (torch.tensor(factors) * positions_per_radian)
        case Llama3Scaling() as scaling:
            return _llama3_frequencies(scaling, frequencies)
        case YarnScaling() as scaling:
            stretched = 1.0 / (scaling.factor * positions_per_radian)
            kept_share = _yarn_kept_share(scaling, rope.theta, rotated)
            return stretched * (1 - kept_share) + frequencies * kept_share
    return frequencies


def _llama3_frequencies(scaling: Llama3Scaling, frequencies: torch.Tensor) -> torch.Tensor:
    """Wavelengths that fit `high_turns` times into the original context are kept, those that fit
    less than `low_turns` times are stretched by `factor`, the others are interpolated."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_turns, scaling.high_turns
    kept_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies


def _yarn_kept_share(scaling: YarnScaling, theta: float, rotated: int) -> torch.Tensor:
    """The share of each pair's own frequency that is kept, [R / 2] fp32: a ramp over the pairs from
    1 to 0."""

    def pair_of(turns: float) -> float:
        """The pair, as a real number, that turns so often in the original context."""
        positions_per_radian = scaling.original_context / (2 * math.pi * turns)
        return rotated * math.log(positions_per_radian) / (2 * math.log(theta))

    first, last = pair_of(scaling.fast_turns), pair_of(scaling.slow_turns)
    if scaling.truncated:
        first, last = math.floor(first), math.ceil(last)
    # The upper bound is transformers', though there are half as many pairs.
    first, last = max(first, 0), min(last, rotated - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(rotated // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / (last - first)).clamp(0.0, 1.0)
