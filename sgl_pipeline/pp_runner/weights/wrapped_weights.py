"""The base of sources of weights that change how another source's tensors are read."""

from collections.abc import Iterable, Iterator

import torch

from sgl_pipeline.pp_runner.weights.checkpoint import WeightSource


class WrappedWeights:
    """A `WeightSource` with the tensors of `source`, whose `loaded` it shares."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.loaded = source.loaded

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def is_made_up(self) -> bool:
        return self._source.is_made_up

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._source.shape_of(name)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._source.read(name, shape)

    def read_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._source.read_as(name, shape, dtype)

    def read_parts(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Iterator[torch.Tensor]:
        return self._source.read_parts(name, shape, dtype)
