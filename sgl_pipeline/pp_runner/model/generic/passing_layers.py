"""Stand-ins in a decoder: for layers that a stage does not run, and for the stage's first layer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# What a decoder gives to a layer: arguments after the stream, and those by name.
Given = tuple[tuple[Any, ...], Mapping[str, Any]]


class _InPlaceOf(nn.Module):
    """Has the plain attributes of `layer`, by which decoders choose what they give to a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and name not in vars(self):
                setattr(self, name, value)


class PassedLayer(_InPlaceOf):
    """In the place of a layer of another stage: the residual stream passes."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class EnteredLayer(_InPlaceOf):
    """`layer`, which begins with `stream` [1, T, H] instead of what the decoder hands it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.layer = layer
        self.stream: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert self.stream is not None, "a stage after the first has no stream"
        return self.layer(self.stream, *args, **kwargs)


class HeardLayer(_InPlaceOf):
    """In the place of `layer`: keeps the `stream` [1, T, H] and all else that it is `given`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.stream = torch.empty(0)
        self.given: Given = ((), {})

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.stream, self.given = hidden_states, (args, kwargs)
        return hidden_states
