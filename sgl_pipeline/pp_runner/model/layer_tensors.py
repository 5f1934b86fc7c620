"""One layer's tensors, read from a `WeightSource` and joined as the layer uses them.

Used by the decoder layer and its MLPs while a stage loads; names are those of `families.py`.
"""

from collections.abc import Sequence

import torch

from sgl_pipeline.pp_runner.layer_kernels.backend import LayerKernels, Linear
from sgl_pipeline.pp_runner.model.checkpoint import WeightSource


class LayerTensors:
    """The tensors under `prefix`, which ends with a dot; `kernels` are to multiply with them."""

    def __init__(self, prefix: str, weights: WeightSource, kernels: LayerKernels) -> None:
        self.kernels = kernels
        self._prefix = prefix
        self._weights = weights

    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`.weight."""
        return self._weights.read(f"{self._prefix}{name}.weight", shape)

    def stacked_weight(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> torch.Tensor:
        """The named matrices, or the single one that holds them all, one below the other."""
        sizes = _sizes_in_file(names, out_features)
        return torch.cat(
            [
                self.weight(name, (size, in_features))
                for name, size in zip(names, sizes, strict=True)
            ]
        )

    def linear(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int, has_bias: bool
    ) -> Linear:
        """One product for the named projections, or the single one that holds them all."""
        return self.kernels.linear(*self._joined(names, out_features, in_features, has_bias))

    def gated_linear(
        self, names: Sequence[str], inner_size: int, in_features: int, has_bias: bool
    ) -> Linear:
        """`LayerKernels.gated_linear` of the named projections to the gate and to what it gates."""
        out_features = (inner_size, inner_size)
        return self.kernels.gated_linear(*self._joined(names, out_features, in_features, has_bias))

    def _joined(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int, has_bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias, if there is one, of the named projections."""
        bias = None
        if has_bias:
            sizes = _sizes_in_file(names, out_features)
            bias = torch.cat(
                [
                    self._weights.read(f"{self._prefix}{name}.bias", (size,))
                    for name, size in zip(names, sizes, strict=True)
                ]
            )
        return self.stacked_weight(names, out_features, in_features), bias


def _sizes_in_file(names: Sequence[str], sizes: Sequence[int]) -> Sequence[int]:
    return [sum(sizes)] if len(names) == 1 else sizes
