"""The gated MLP: all of a dense layer's feed-forward part, or one expert of a sparse one.

Shapes: T rows, H hidden size, F feed-forward size.
"""

from typing import Protocol

import torch

from sgl_pipeline.pp_runner.families import MlpNames
from sgl_pipeline.pp_runner.layer_kernels.backend import LayerKernels
from sgl_pipeline.pp_runner.layer_tensors import LayerTensors
from sgl_pipeline.pp_runner.linear import Linear


class Mlp(Protocol):
    """What stands between the second norm of a layer and the residual stream."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, H] for `x` [T, H], in its dtype."""


class GatedMlp:
    """`down(silu(gate(x)) * up(x))` (SwiGLU, arXiv 2002.05202).

    Args:
        gate_up: to [T, 2 F], gate first.
        down: back to [T, H].
        kernels: compute what lies between the two.
    """

    def __init__(self, gate_up: Linear, down: Linear, kernels: LayerKernels) -> None:
        self._gate_up = gate_up
        self._down = down
        self._kernels = kernels

    @classmethod
    def load(
        cls,
        tensors: LayerTensors,
        names: MlpNames,
        hidden_size: int,
        inner_size: int,
        kernels: LayerKernels,
        has_bias: bool = False,
    ) -> "GatedMlp":
        """Reads the MLP that the checkpoint calls `names`."""
        return cls(
            tensors.linear(names.gate_up, (inner_size, inner_size), hidden_size, has_bias),
            tensors.linear((names.down,), (hidden_size,), inner_size, has_bias),
            kernels,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._kernels.gate(self._gate_up(x)))
