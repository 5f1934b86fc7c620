"""The store of a server as its stages reach it."""

from collections.abc import Sequence

from sgl_pipeline.errors import ConfigurationError, StoreError
from sgl_pipeline.kv_store.atomic_files import Buffer
from sgl_pipeline.kv_store.host_objects import HostObjects
from sgl_pipeline.kv_store.open_store import HOST_BACKEND, open_objects
from sgl_pipeline.kv_store.page_store import ObjectStore
from sgl_pipeline.wire.store_orders import StorePlace


class ClosedStore:
    """A store that cannot be used from here: each transfer fails, and says why."""

    groups_layers = False

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def write(self, name: str, parts: Sequence[Buffer]) -> list[int]:
        raise StoreError(self._reason)

    def read_into(
        self,
        name: str,
        parts: Sequence[Buffer],
        checksums: Sequence[int],
        num_bytes: int,
        offset: int = 0,
    ) -> None:
        raise StoreError(self._reason)

    def delete(self, name: str) -> bool:
        return False


class StageStores:
    """Opens stores. Host memory is opened once: what it holds outlives the orders that interrupt
    transfers."""

    def __init__(self) -> None:
        self._host_memory: HostObjects | None = None

    def open(self, place: StorePlace, object_sizes: Sequence[int]) -> ObjectStore:
        """The store at `place`. The scheduler has tried it; a stage of another host may still not
        reach it, which costs hits and no request.

        Args:
            object_sizes: the bytes of an object, of each layer of the stage.
        """
        if place.backend == HOST_BACKEND:
            return self._open_host_memory(place, object_sizes)
        self._host_memory = None
        try:
            return open_objects(place)
        except ConfigurationError as error:
            return ClosedStore(str(error))

    def _open_host_memory(self, place: StorePlace, object_sizes: Sequence[int]) -> HostObjects:
        if self._host_memory is None or self._host_memory.num_pages != place.host_pages:
            self._host_memory = HostObjects(place.host_pages)
        self._host_memory.make_room(object_sizes)
        return self._host_memory
