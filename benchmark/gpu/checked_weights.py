"""The random weights of the models that `checks.py` compares.

A choice of experts is a step: where rounding sends a row to another expert, its result is another
one, right as it may be. So models with experts get weights with which it cannot.
"""

from collections.abc import Iterator

import torch

from sgl_pipeline.pp_runner.model.families import TensorNames
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.weights.checkpoint import DummyWeights, WeightSource
from sgl_pipeline.pp_runner.weights.wrapped_weights import WrappedWeights

_ROUTING_SHARE = 8  # of the dimensions of the residual stream, one
_MAGNITUDE = 2.0**-4  # of the same order as the other dimensions
_ROUTER_FACTOR = 4.0  # so that a row's experts have different weights


def checked_weights(spec: DecoderSpec, device: torch.device) -> WeightSource:
    """The weights of a bf16 model of this kind."""
    if spec.experts is None:
        return DummyWeights(torch.bfloat16, device)
    return RoutedWeights(spec.names, device)


class UpcastWeights(WrappedWeights):
    """The weights of `source` as fp32 numbers of the same value."""

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return super().read(name, shape).float()

    def read_parts(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Iterator[torch.Tensor]:
        for part in super().read_parts(name, shape, dtype):
            yield part.float() if dtype is None else part


class RoutedWeights(DummyWeights):
    """The dummy weights of a bf16 model whose tokens each have experts of their own in a layer,
    however its arithmetic rounds.

    The first dimensions of the residual stream hold signs of the token, all of one magnitude, and
    no layer adds to them. Routers read these alone. A norm scales and rounds them all alike, so
    that the order of a router's logits stays.
    """

    def __init__(self, names: TensorNames, device: torch.device) -> None:
        super().__init__(torch.bfloat16, device)
        self._embedding = f"{names.embedding}.weight"
        self._router = f".{names.router}.weight"
        expert_down = names.expert.down.rpartition(".")[2]
        self._outputs = (f".{names.output}.weight", f".{expert_down}.weight")

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = super().read(name, shape)
        if name == self._embedding:
            signs = tensor[:, : shape[1] // _ROUTING_SHARE]
            signs.copy_(torch.where(signs < 0, -_MAGNITUDE, _MAGNITUDE))
        elif name.endswith(self._router):
            tensor[:, shape[1] // _ROUTING_SHARE :] = 0
            tensor *= _ROUTER_FACTOR
        elif name.endswith(self._outputs):
            tensor[: shape[0] // _ROUTING_SHARE] = 0
        return tensor
