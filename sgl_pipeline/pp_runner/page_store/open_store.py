"""The store of a server as its stages reach it."""

from collections.abc import Sequence

from sgl_pipeline.errors import ConfigurationError, StoreError
from sgl_pipeline.kv_store.atomic_files import Buffer
from sgl_pipeline.kv_store.open_store import open_objects
from sgl_pipeline.kv_store.page_store import ObjectStore
from sgl_pipeline.wire.store_orders import StorePlace


class ClosedStore:
    """A store that cannot be used from here: each transfer fails, and says why."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def write(self, name: str, buffers: Sequence[Buffer]) -> tuple[int, int]:
        raise StoreError(self._reason)

    def read_into(self, name: str, buffer: Buffer, num_bytes: int, checksum: int) -> None:
        raise StoreError(self._reason)

    def delete(self, name: str) -> bool:
        return False


def open_store(place: StorePlace) -> ObjectStore:
    """The store at `place`. The scheduler has tried it; a stage of another host may still not reach
    it, which costs hits and no request."""
    try:
        return open_objects(place)
    except ConfigurationError as error:
        return ClosedStore(str(error))
