"""Proves, with real tensors, that a decoder does nothing with the residual stream beside its
layers, and that what it gives to layers belongs to their rows.

Else a model would compute something else where it is cut into stages, or in steps with other
requests' rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sgl_pipeline.errors import UnsupportedModelError
from sgl_pipeline.pp_runner.model.generic.passing_layers import PassedLayer
from sgl_pipeline.pp_runner.model.generic.skeleton import Skeleton

_POSITIONS = (7, 0, 3, 12, 5)


class _Begins(nn.Module):
    """The layer with which the made-up stage begins; `given` is what the decoder gave it."""

    def __init__(self, layer: PassedLayer, stream: torch.Tensor) -> None:
        super().__init__()
        self.__dict__.update(
            {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        )
        self._stream = stream
        self.given: list[tuple[str, torch.Tensor]] = []

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.given = [*_tensors("", args), *_tensors("", kwargs)]
        return self._stream


def probe_stream(skeleton: Skeleton, passed: Sequence[PassedLayer], dtype: torch.dtype) -> None:
    """Runs the decoder of `skeleton` with no layers but `passed` ones and no norm.

    Raises UnsupportedModelError naming what is not passed on, or depends on other rows.
    """
    for layer in {0, len(passed) // 2, len(passed) - 1}:
        rows = _given(skeleton, passed, layer, _POSITIONS, dtype)
        turned = _given(skeleton, passed, layer, _POSITIONS[::-1], dtype)
        alone = _given(skeleton, passed, layer, _POSITIONS[:1], dtype)
        for (name, tensor), (_, other), (_, single) in zip(rows, turned, alone, strict=True):
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise UnsupportedModelError(
                    f"its decoder gives {name} to layers, which depends on the embedding; only the "
                    "first stage has that"
                )
            if not _is_of_rows(tensor, other, single):
                raise UnsupportedModelError(
                    f"its decoder gives {name} to layers, which depends on more than the position "
                    "of each row"
                )


def _given(
    skeleton: Skeleton,
    passed: Sequence[PassedLayer],
    layer: int,
    positions: Sequence[int],
    dtype: torch.dtype,
) -> list[tuple[str, torch.Tensor]]:
    """The tensors that `layer` gets, of a stage that begins there. Whatever the decoder does with
    its inputs is NaN."""
    hidden_size = skeleton.embedding.weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    shape = (1, len(positions), hidden_size)
    stream = torch.randn(shape, generator=generator).to(dtype)
    begins = _Begins(passed[layer], stream)
    decoder = skeleton.decoder
    decoder.layers = nn.ModuleList([*passed[:layer], begins, *passed[layer + 1 :]])
    try:
        found = decoder(
            inputs_embeds=torch.full(shape, torch.nan, dtype=dtype),
            position_ids=torch.tensor([positions]),
            use_cache=False,
        ).last_hidden_state
    finally:
        decoder.layers = nn.ModuleList(passed)
    if found.dtype != dtype or not torch.equal(found, stream):
        raise UnsupportedModelError(
            "its decoder changes the residual stream after the layers, so it cannot be cut into "
            "stages"
        )
    return begins.given


def _is_of_rows(tensor: torch.Tensor, turned: torch.Tensor, alone: torch.Tensor) -> bool:
    """True if each row of `tensor` is the same with the rows the other way round, and alone. A
    tensor without rows must not change at all."""
    num_rows = len(_POSITIONS)
    dims = [dim for dim, size in enumerate(tensor.shape) if size == num_rows]
    if tensor.shape != turned.shape or alone.dim() != tensor.dim():
        return False
    if not dims:
        return torch.equal(tensor, turned) and torch.equal(tensor, alone)
    return any(
        torch.equal(tensor, turned.flip(dim)) and torch.equal(tensor.narrow(dim, 0, 1), alone)
        for dim in dims
    )


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in `value`, with a name."""
    if isinstance(value, torch.Tensor):
        yield name or "a tensor", value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors(str(key), one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(name, one)
