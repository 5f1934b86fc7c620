"""The store of a server as its stages reach it."""

from collections.abc import Sequence
from typing import Protocol

import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.kv_store.object_files import ObjectFiles
from sgl_pipeline.kv_store.store_folder import open_folder
from sgl_pipeline.wire.store_orders import StorePlace


class ObjectStore(Protocol):
    """Objects by name. One thread writes while another one reads."""

    def write(self, name: str, buffers: Sequence[memoryview]) -> tuple[int, int]:
        """Makes or replaces an object of these parts; gives its bytes and their CRC-32.

        Raises StoreError when it cannot be written, StoreFull where there is no space.
        """

    def read_into(self, name: str, buffer: memoryview, num_bytes: int, checksum: int) -> None:
        """Fills the first `num_bytes` of `buffer` with an object.

        Raises BrokenObject when it is missing, or is not what `num_bytes` and `checksum` say, and
        StoreError when it cannot be read.
        """


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
