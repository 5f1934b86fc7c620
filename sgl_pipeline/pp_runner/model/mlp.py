"""The gated MLP: all of a dense layer's feed-forward part, or one expert of a sparse one.

Shapes: T rows, H hidden size, F feed-forward size.
"""

from functools import partial
from typing import Protocol

import torch

from sgl_pipeline.pp_runner.layer_kernels.layer_backend import (
    GateClamp,
    GatedLinear,
    LayerKernels,
    Linear,
)
from sgl_pipeline.pp_runner.model.families import MlpNames
from sgl_pipeline.pp_runner.model.layer_tensors import LayerTensors
from sgl_pipeline.pp_runner.weights.quantized_weights import Matrix


class Mlp(Protocol):
    """The part between the second norm of a layer and the residual stream."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, H] for `x` [T, H], in its dtype."""


class GatedMlp:
    """`down(silu(gate(x)) * up(x))` (SwiGLU, arXiv 2002.05202).

    Args:
        gated_up: to `silu(gate(x)) * up(x)` [T, F].
        down: back to [T, H].
    """

    def __init__(self, gated_up: Linear, down: Linear) -> None:
        self._gated_up = gated_up
        self._down = down

    @classmethod
    def load(
        cls,
        tensors: LayerTensors,
        names: MlpNames,
        hidden_size: int,
        inner_size: int,
        has_bias: bool = False,
    ) -> "GatedMlp":
        """Reads the MLP with `names` in the checkpoint."""
        return cls(
            tensors.gated_linear(names.gate_up, inner_size, hidden_size, has_bias),
            tensors.linear((names.down,), (hidden_size,), inner_size, has_bias),
        )

    @classmethod
    def clamped(
        cls,
        kernels: LayerKernels,
        clamp: GateClamp,
        gate_up: tuple[Matrix, torch.Tensor],
        down: tuple[Matrix, torch.Tensor],
    ) -> "GatedMlp":
        """With `clamp` in the place of silu, from matrices [2 F, H], gates first, and [H, F], each
        with its bias."""
        gated_up = GatedLinear(kernels.linear(*gate_up), partial(kernels.clamped_gate, clamp=clamp))
        return cls(gated_up, kernels.linear(*down))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._gated_up(x))
