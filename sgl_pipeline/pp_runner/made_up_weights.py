"""Weights of which only the sizes matter, for timing."""

import math
from collections.abc import Iterable, Iterator

import torch

# Odd, so that the rows of a matrix (of a router, say) differ although they repeat it.
PATTERN_LENGTH = 1_000_003


class MadeUpWeights:
    """A `WeightSource` whose tensors repeat some random numbers, as fast as memory is written; on
    torch's meta device they have sizes alone."""

    is_made_up = True

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.loaded: dict[str, int] = {}
        self.dtype = dtype
        self.device = device
        generator = torch.Generator().manual_seed(0)
        pattern = torch.empty(PATTERN_LENGTH).normal_(0.0, 0.02, generator=generator)
        self._pattern = pattern.to(device, dtype)

    def has(self, name: str) -> bool:
        return False

    def names(self) -> Iterable[str]:
        return ()

    def shape_of(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError("weights that are made up have the shape that is asked for")

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(math.prod(shape), dtype=self.dtype, device=self.device)
        if not tensor.is_meta:
            for part in tensor.split(PATTERN_LENGTH):
                part.copy_(self._pattern[: part.numel()])
        self.loaded[name] = tensor.nbytes
        return tensor.view(shape)

    def read_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError("weights that are made up have no tensors of a layout")

    def read_parts(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Iterator[torch.Tensor]:
        if dtype is not None:
            raise NotImplementedError("weights that are made up have no tensors of a layout")
        for _ in range(shape[0]):
            yield self.read(name, shape[1:])
        self.loaded[name] = math.prod(shape) * self.dtype.itemsize
