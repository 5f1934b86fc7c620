"""A storage backend as somebody else might write it for SGLang: a dictionary behind its interface.

A storage process imports it by name (`dynamic`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage


class StoredTensors(HiCacheStorage):
    """Keys with "refused" in them are not taken, those with "raise" raise."""

    def __init__(self, config: Any, arguments: dict[str, Any]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        assert config.is_mla_model and config.model_name.startswith("ukv1-")

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        if "raise" in key:
            raise RuntimeError("the backend is ill")
        return self._tensors.get(key)

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        return [self.get(key) for key in keys]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        if "refused" in key:
            return False
        self._tensors.setdefault(key, value.clone())
        return True

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return all(self.set(key, value) for key, value in zip(keys, values, strict=True))

    def exists(self, key: str) -> bool:
        return key in self._tensors

    def clear(self) -> None:
        self._tensors.clear()

    # Upstream's interface "v1": chunks of the registered pool by index.
    def batch_get_v1(self, keys: Sequence[str], indices: torch.Tensor, extra: Any = None) -> Any:
        for key, index in zip(keys, indices, strict=True):
            if self.exists(key):
                self.mem_pool_host.set_from_flat_data_page(int(index), self._tensors[key])
        return [self.exists(key) for key in keys]

    def batch_set_v1(self, keys: Sequence[str], indices: torch.Tensor, extra: Any = None) -> Any:
        pool = self.mem_pool_host
        return [
            self.set(key, pool.get_data_page(int(index)))
            for key, index in zip(keys, indices, strict=True)
        ]
