"""Adds up the memory of the tensors that a piece of code keeps alive at once."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Inside, `peak_bytes` follows what operators return, each storage counted once while anything
    refers to it. What an operator allocates for itself alone is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._live:
            self._live[key] = storage.nbytes()
            weakref.finalize(storage, self._live.pop, key, None)
