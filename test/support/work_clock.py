"""A clock that stands still but for the work of torch's operators."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WorkClock(TorchDispatchMode):
    """Inside, each operator takes `ms_per_operator`, whatever its size, and `ms_per_number` for
    each number that it gives out. `now_s` tells the time."""

    def __init__(self, ms_per_operator: float, ms_per_number: float) -> None:
        super().__init__()
        self._ms_per_operator = ms_per_operator
        self._ms_per_number = ms_per_number
        self._now_ms = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        numbers = sum(
            leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)
        )
        self._now_ms += self._ms_per_operator + self._ms_per_number * numbers
        return result

    def now_s(self) -> float:
        return self._now_ms * 1e-3
