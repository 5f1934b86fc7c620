"""The rotary embedding (RoFormer, arXiv 2104.09864): from positions to angles.

Computed once a step; `layer_kernels/` rotates the heads by these angles. Keeps no table, so there
is no longest position.
"""

import math

import torch

from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Rotation
from sgl_pipeline.pp_runner.model.model_spec import RopeSpec


class RotaryEmbedding:
    """The angles of a model, computed in fp32 from the positions of each step; transformers
    computes the same numbers."""

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._frequencies = rotary_frequencies(rope, head_dim).to(device)
        self._interleaved = rope.interleaved

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of rows at `positions` [T] (int64)."""
        angles = positions[:, None].float() * self._frequencies
        return Rotation(angles.cos(), angles.sin(), self._interleaved)


def rotary_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, [R / 2] fp32, lowest dimension first.

    `llama3` is what `_compute_llama3_parameters` in transformers' modeling_rope_utils.py does:
    wavelengths that fit `high_freq_factor` times into the original context are kept, wavelengths
    that fit less than `low_freq_factor` times are stretched by `factor`, the others are
    interpolated.
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
