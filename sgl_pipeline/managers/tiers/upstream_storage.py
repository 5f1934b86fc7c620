"""A storage backend of SGLang, unmodified, called as upstream's controller calls it (0.5.23,
`managers/cache_controller.py`), over chunks of a `StagingPool`."""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.storage import StorageBackendFactory

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.tiers.staging_pool import StagingPool

# Those that were tried, and whether they read and write the pool by index (upstream's interface
# "v1"). A `dynamic` one says so itself.
BACKENDS = {"dynamic": False, "nixl": True, "mooncake": True}


class UpstreamStorage:
    """Moves chunks of `pool` to a backend and back.

    Args:
        backend: one of BACKENDS.
        extra_config: of the backend, without the keys that upstream's controller takes out.
        digest: the backend's name for the model, part of its own names.

    Raises ConfigurationError where the backend cannot be made.
    """

    def __init__(
        self, backend: str, extra_config: dict[str, Any], digest: str, pool: StagingPool
    ) -> None:
        if backend not in BACKENDS:
            raise ConfigurationError(
                f"--hicache-storage-backend {backend} has not been tried here; "
                f"choose from file, {', '.join(BACKENDS)}"
            )
        self._pool = pool
        self._is_indexed = BACKENDS[backend] or (
            backend == "dynamic" and bool(extra_config.get("interface_v1", 0))
        )
        config = _storage_config(extra_config, digest)
        try:
            self._backend: HiCacheStorage = StorageBackendFactory.create_backend(
                backend, config, pool
            )
            self._backend.register_mem_pool_host(pool)
            self._backend.on_host_pools_registered()
        except Exception as error:
            raise ConfigurationError(
                f"SGLang's storage backend {backend} cannot be set up: "
                f"{type(error).__name__}: {error}"
            ) from error

    def set(self, names: Sequence[str], first_chunk: int) -> list[bool]:
        """Stores chunks; says which the backend has."""
        chunks = range(first_chunk, first_chunk + len(names))
        if self._is_indexed:
            return _booleans(self._backend.batch_set_v1([*names], _indices(chunks)), names)
        pages = [self._pool.get_data_page(chunk) for chunk in chunks]
        return [bool(self._backend.batch_set([*names], pages))] * len(names)

    def get(self, names: Sequence[str], first_chunk: int) -> list[bool]:
        """Fills chunks; says which are filled."""
        chunks = range(first_chunk, first_chunk + len(names))
        if self._is_indexed:
            return _booleans(self._backend.batch_get_v1([*names], _indices(chunks)), names)
        pages = self._backend.batch_get(
            [*names], [self._pool.get_dummy_flat_data_page() for _ in names]
        )
        for chunk, page in zip(chunks, pages or (), strict=False):
            if page is not None:
                self._pool.set_from_flat_data_page(chunk, page)
        return _booleans([page is not None for page in pages or ()], names)

    def count(self, names: Sequence[str]) -> int:
        """The number that are there, up to the first that is not."""
        return int(self._backend.batch_exists([*names]))

    def clear(self) -> None:
        """Removes all that the backend has, whoever stored it."""
        self._backend.clear()


def _storage_config(extra_config: dict[str, Any], digest: str) -> HiCacheStorageConfig:
    """One rank of one: names are complete, so backends must not add who wrote an object."""
    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=True,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=digest,
        extra_config=extra_config,
    )


def _indices(chunks: range) -> torch.Tensor:
    return torch.tensor(chunks, dtype=torch.int64)


def _booleans(successes: Sequence[bool] | None, names: Sequence[str]) -> list[bool]:
    """One for each name; a backend that gives fewer has failed for the rest."""
    found = [bool(success) for success in successes or ()][: len(names)]
    return found + [False] * (len(names) - len(found))
