"""Weights of which only the sizes matter, for timing."""

import math

import torch

from sgl_pipeline.pp_runner.weights.checkpoint import DUMMY_DEVIATION, DummyWeights

# Odd, so that the rows of a matrix (of a router, say) differ although they repeat it.
PATTERN_LENGTH = 1_000_003


class MadeUpWeights(DummyWeights):
    """Dummy weights whose tensors repeat some random numbers, as fast as memory is written; on
    torch's meta device they have sizes alone."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        generator = torch.Generator().manual_seed(0)
        pattern = torch.empty(PATTERN_LENGTH).normal_(0.0, DUMMY_DEVIATION, generator=generator)
        self._pattern = pattern.to(device, dtype)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(math.prod(shape), dtype=self.dtype, device=self.device)
        if not tensor.is_meta:
            for part in tensor.split(PATTERN_LENGTH):
                part.copy_(self._pattern[: part.numel()])
        self.loaded[name] = tensor.nbytes
        return tensor.view(shape)
