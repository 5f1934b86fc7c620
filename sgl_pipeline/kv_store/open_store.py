"""Opens a store by its place, for stages and for the scheduler process."""

from sgl_pipeline.kv_store.disk_guard import DiskGuard
from sgl_pipeline.kv_store.file_store import FileStore
from sgl_pipeline.kv_store.folder_bounds import StoreBounds
from sgl_pipeline.kv_store.host_objects import HostObjects
from sgl_pipeline.kv_store.host_pages import HostPages
from sgl_pipeline.kv_store.object_files import ObjectFiles
from sgl_pipeline.kv_store.page_store import ObjectStore, PageStore
from sgl_pipeline.kv_store.storage_client import StorageClient
from sgl_pipeline.kv_store.storage_pages import StoragePages
from sgl_pipeline.kv_store.store_folder import open_folder
from sgl_pipeline.wire.store_orders import StorePlace

FILE_BACKEND = "file"
# Memory of each stage's own process.
HOST_BACKEND = "host"


def open_objects(place: StorePlace) -> ObjectStore:
    """The objects of a store; one for each thread. Raises ConfigurationError for a folder that
    cannot be one."""
    if place.backend == FILE_BACKEND:
        folder = open_folder(place.address)
        return ObjectFiles(folder, DiskGuard(folder, min_free_bytes=place.min_free_bytes))
    if place.backend == HOST_BACKEND:
        return HostObjects(place.host_pages)
    return StorageClient(place.address)


def open_pages(place: StorePlace, num_layers: int, bounds: StoreBounds | None = None) -> PageStore:
    """The pages of a store, for `StoreClient`. Raises ConfigurationError as `open_objects`.

    Args:
        num_layers: of the whole model.
        bounds: of a folder; other backends keep their own.
    """
    if place.backend == FILE_BACKEND:
        return FileStore(open_folder(place.address), place.digest, num_layers, bounds)
    if place.backend == HOST_BACKEND:
        return HostPages(place.host_pages)
    return StoragePages(StorageClient(place.address), place.digest, num_layers)
