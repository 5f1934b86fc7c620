"""The store of a server as its stages reach it."""

import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.kv_store.object_files import ObjectFiles
from sgl_pipeline.kv_store.page_store import ObjectStore
from sgl_pipeline.kv_store.store_folder import open_folder
from sgl_pipeline.wire.store_orders import StorePlace


def open_store(place: StorePlace, device: torch.device) -> ObjectStore:
    """The store at `place`, for pages in the memory of `device`.

    Raises ConfigurationError when it cannot be used from here.
    """
    if device.type != "cpu":
        raise ConfigurationError(
            f"--hicache-storage-backend with --device {device.type} is not built: pages in a GPU's "
            "memory have no way to a store; use --device cpu or leave the backend out"
        )
    if place.backend != "file":
        raise ConfigurationError(
            f"--hicache-storage-backend {place.backend} is not built for stages; use file"
        )
    return ObjectFiles(open_folder(place.address))
