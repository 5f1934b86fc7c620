"""The source of weights of a stage that serves while it loads: it pauses between tensors."""

from collections.abc import Callable, Iterator

import torch

from sgl_pipeline.pp_runner.weights.checkpoint import WeightSource
from sgl_pipeline.pp_runner.weights.wrapped_weights import WrappedWeights


class PacedWeights(WrappedWeights):
    """The tensors of `source`, with a `pause` before each tensor, and after each part of one."""

    def __init__(self, source: WeightSource, pause: Callable[[], None]) -> None:
        super().__init__(source)
        self._pause = pause

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._pause()
        return super().read(name, shape)

    def read_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._pause()
        return super().read_as(name, shape, dtype)

    def read_parts(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Iterator[torch.Tensor]:
        self._pause()
        for part in super().read_parts(name, shape, dtype):
            yield part
            self._pause()
