"""A store that is in use: its place, the scheduler's client, and the process of a backend."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from sgl_pipeline.args import PipelineArgs, TierArgs, require
from sgl_pipeline.args.store_config import StoreConfig
from sgl_pipeline.errors import ConfigurationError, StoreError
from sgl_pipeline.kv_store.folder_bounds import StoreBounds
from sgl_pipeline.kv_store.open_store import (
    FILE_BACKEND,
    HOST_BACKEND,
    open_objects,
    open_pages,
)
from sgl_pipeline.kv_store.page_store import self_test
from sgl_pipeline.kv_store.store_client import StoreClient
from sgl_pipeline.managers.tiers.host_tier import host_place
from sgl_pipeline.managers.tiers.storage_launch import StorageProcess
from sgl_pipeline.managers.tiers.storage_server import StorageSettings
from sgl_pipeline.managers.tiers.store_identity import StoreIdentity, store_identity
from sgl_pipeline.pipeline.pipeline_capacity import PipelineCapacity
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec
from sgl_pipeline.process_lifetime import child_environment
from sgl_pipeline.wire.store_orders import StorePlace


@dataclass(frozen=True)
class OpenTier:
    """`process` is None where the stages and the scheduler reach the store by themselves."""

    place: StorePlace
    client: StoreClient
    process: StorageProcess | None = None

    def close(self) -> None:
        """Writes what is to be written, and ends what was started for the store."""
        self.client.close()
        if self.process is not None:
            self.process.close()


StoreOpener = Callable[[TierArgs], OpenTier]


def store_opener(
    args: PipelineArgs, spec: ModelSpec, capacity: PipelineCapacity | None = None
) -> StoreOpener:
    """The way to open a store for the pages of this server; the model is identified at the first
    call.

    Args:
        capacity: of the stages, for host memory, whose size follows from that of their pools; None
            before they have loaded.
    """
    identity = cache(lambda: store_identity(args, spec))

    def open_store(tiers: TierArgs) -> OpenTier:
        if tiers.backend == HOST_BACKEND:
            assert capacity is not None, "host memory is opened before the stages have loaded"
            place = host_place(tiers, identity().digest, capacity)
            return OpenTier(place, StoreClient(open_pages(place, identity().num_layers)))
        require(
            tiers.backend == FILE_BACKEND or args.cluster.num_hosts == 1,
            f"--hicache-storage-backend {tiers.backend} on {args.cluster.num_hosts} hosts is not "
            "built: its process serves one host; use file, in a folder that all hosts share",
        )
        return open_tier(tiers, identity(), args.run_directory)

    return open_store


def open_tier(args: TierArgs, identity: StoreIdentity, run_directory: str) -> OpenTier:
    """Opens the store of `args.backend` and tries it with one object.

    Raises ConfigurationError where it cannot be used.
    """
    assert args.backend is not None
    store, process = args.store, None
    address = os.path.abspath(store.file_storage_path)
    if args.backend != FILE_BACKEND:
        address = f"{run_directory}/storage"
        process = _storage_process(args.backend, store, identity, address)
    place = StorePlace(
        backend=args.backend,
        address=address,
        digest=identity.digest,
        save_bytes_per_s=store.save_bytes_per_s,
        min_free_bytes=store.min_free_space,
    )
    try:
        self_test(open_objects(place), identity.digest)
        pages = open_pages(place, identity.num_layers, _bounds(store))
    except BaseException as error:
        if process is not None:
            process.close()
        if isinstance(error, StoreError):
            raise ConfigurationError(
                f"--hicache-storage-backend {args.backend} fails its test: {error}"
            ) from error
        raise
    return OpenTier(place, StoreClient(pages), process)


def _bounds(store: StoreConfig) -> StoreBounds:
    return StoreBounds(
        max_bytes=store.max_size, max_files=store.max_files, min_free_bytes=store.min_free_space
    )


def _storage_process(
    backend: str, store: StoreConfig, identity: StoreIdentity, address: str
) -> StorageProcess:
    settings = StorageSettings(
        address=address,
        backend=backend,
        extra_config=dict(store.backend_settings),
        digest=identity.digest,
        object_bytes=identity.object_bytes,
    )
    return StorageProcess(settings, child_environment())
